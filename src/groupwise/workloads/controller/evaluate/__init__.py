"""The final evaluation of a controller: accuracy and measured latency beside baselines."""
