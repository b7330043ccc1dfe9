"""Characters that texts of tests are drawn from.

Hypothesis takes seconds to list all characters there are, in each process of a new clone.
"""

_OTHERS = "\u0301\u05d0\u200b\u2028\u202e\u2260\u3042\u6f22\ufe0f\ufeff\ufffd\U0001f642\U0010ffff"
"""One that combines with the one before, other scripts and directions, spaces, and the longest in UTF-8."""
CHARACTERS = "".join(map(chr, range(0x180))) + _OTHERS
