"""The embedded task: clips of a textured plane, seen by a camera whose path is asked for."""
