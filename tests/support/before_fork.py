"""Loaded last before ranks are forked: does once what each of them would do, for seconds of its core.

An engine tells the compiler of the runtime's modules, and torch compiles a long regular expression again for each.
A collection of garbage looks at the 300 000 objects of imported modules; here they are set aside. Each rank imports its
test's module, which is compiled once if its bytecode may be written.
"""

from __future__ import annotations

import gc
import sys

import seeding  # noqa: F401, makes it cheaper

from zerocli.engine.recompute.compiled import tell_compiler

sys.dont_write_bytecode = False
tell_compiler()
gc.collect()
gc.freeze()
