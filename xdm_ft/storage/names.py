"""Names that users give (methods, domains) → names of files and folders."""

from __future__ import annotations

from urllib.parse import quote

from xdm_ft.storage.digests import digest

LONGEST = 120  # bytes; file systems allow 255, and callers add endings
EMPTY, CUT = "%-", "%~"  # no percent-encoded name contains them


def file_name(*names: str, safe: str = "") -> str:
    """Returns the name of a file or folder for these names. Distinct names have distinct file names.

    A short name of letters, digits, `_.-~` and the characters in `safe` stays as it is. All other characters are
    percent-encoded, so that no name leaves its folder, is empty or is hidden. Several names are joined by commas. If
    the result is longer than `LONGEST` bytes, its end is replaced by a checksum.
    """
    quoted = ",".join(quote(name, safe=safe, errors="surrogatepass") or EMPTY for name in names)
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if len(quoted) <= LONGEST:
        return quoted
    end = f"{CUT}{digest(quoted, bits=128)}"
    return quoted[: LONGEST - len(end)] + end
