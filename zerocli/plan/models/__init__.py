"""Models as a plan asks them: by formulas, traced on fake tensors, or counted."""
