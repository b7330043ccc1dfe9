"""The profile of a run: its memory by tier and its time by cause, measured and compared with the plan.

`ledger.py` logs live memory, `follow.py` and `places.py` fill it; `clock.py` divides the time of a step, `recorder.py`
feeds it from the engine's events; `profiler.py` drives them in a training run. Importing this imports no torch.
"""
