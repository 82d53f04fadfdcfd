"""Embedded tasks, and the models that they bring: name -> "module:function" that returns a LoadedModel.

The function is imported when its model is loaded. A model's name in a checkpoint is looked up here or is a folder or a
name on the hub; it never names code to import.
"""

EMBEDDED_MODELS = {"mosaic": "groupwise.workloads.controller.tasks.mosaic.model:load"}
