"""Loaded before ranks are forked: tells the compiler of the runtime once, which each rank's first engine would do.

It takes two seconds of a core, for torch compiles a long regular expression again for every module that it is told of.
"""

from __future__ import annotations

from zerocli.engine.compiled import tell_compiler

tell_compiler()
