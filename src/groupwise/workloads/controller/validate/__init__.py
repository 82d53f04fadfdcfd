"""The final evaluation of a controller: measured answers on test questions, beside baselines and ceilings."""
