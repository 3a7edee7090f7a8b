"""`judging_cases`, the recorded cases and ways to change their names and times, under a name that tests can import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("judging_cases", Path(__file__).with_name("cases.py"))
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["judging_cases"] = _module
_spec.loader.exec_module(_module)
