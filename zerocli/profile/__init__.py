"""The profile of a run: where its bytes lie and where its seconds go, measured beside what the plan predicts.

`ledger.py` logs live memory, `follow.py` and `places.py` fill it; `clock.py` tiles the time of a step, `recorder.py`
feeds it from the engine's events; `profiler.py` runs them through a training run. Importing this imports no torch.
"""
