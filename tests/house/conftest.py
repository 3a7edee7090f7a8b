"""`house_source`, the reading of the project's own modules, under a name that tests can import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("house_source", Path(__file__).with_name("source.py"))
assert _spec is not None and _spec.loader is not None
source = importlib.util.module_from_spec(_spec)
sys.modules["house_source"] = source
_spec.loader.exec_module(source)
