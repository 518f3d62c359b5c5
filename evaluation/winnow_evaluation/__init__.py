"""Measures models and policies: tasks with known answers, a served model's accuracy, closeness to dense attention."""
