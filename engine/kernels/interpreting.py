"""Whether Triton kernels run in its interpreter, read once, before any kernel is decorated."""

from __future__ import annotations

import os

#: Under the interpreter ``tl.dot`` on bfloat16 gives garbage, so the kernels take this as a constexpr and upcast to float32.
INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
