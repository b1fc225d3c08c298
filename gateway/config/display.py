"""Shows and hashes settings: as JSON values, with no password in them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any


def digest(content: Mapping[str, Any]) -> str:
    """Return twelve hex digits of the SHA-256 of a JSON object."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


_MASK = "***"
# Where a URL's password stands: from the first colon behind the scheme to the last `@`. Parsers differ over what may
# stand between (SQLAlchemy takes a slash, urllib does not), so none of what any of them takes for it is shown.
_USER_INFO = re.compile(r"(?<=://)([^:]*):.*@", re.DOTALL)
# A password may stand among the options as well.
_SECRET_OPTION = re.compile(r"([?&][^=&#]*(?:pass|pwd|secret|token|key|auth)[^=&#]*=)[^&#]*", re.IGNORECASE)


def mask_passwords(text: str) -> str:
    """Return a text with the password of the URL that it is, if it is one, replaced by ``***``."""
    if "://" not in text:
        return text
    return _SECRET_OPTION.sub(rf"\1{_MASK}", _USER_INFO.sub(rf"\1:{_MASK}@", text))


def shown_value(value: Any) -> Any:
    """Return a setting as JSON: money and paths as strings, the password of a URL as ``***``."""
    if isinstance(value, str):
        return mask_passwords(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: shown_value(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): shown_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown_value(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
