"""The corpora that weights were trained on, read from their tag."""

from __future__ import annotations

from pathlib import Path

POSSIBLY_SEEN = "unseen in fine-tuning, possibly seen in pre-training"
# part of a tag → name as in the model cards of timm and open_clip; longer parts first: "laion" is in "laion2b"
CORPORA = {
    "in12k": "ImageNet-12k",
    "in21k": "ImageNet-21k",
    "in22k": "ImageNet-22k",
    "in1k": "ImageNet-1k",
    "openai": "OpenAI WIT-400M",
    "laion2b": "LAION-2B",
    "laion5b": "LAION-5B",
    "laion400m": "LAION-400M",
    "laiona": "LAION-Aesthetics",
    "laion": "LAION",
    "datacomp": "DataComp",
    "commonpool": "CommonPool",
    "dfndr": "DFNDR",
    "dfn": "DFN",
    "metaclip": "MetaCLIP",
    "webli": "WebLI",
    "merged2b": "Merged-2B",
    "cc12m": "CC12M",
    "yfcc15m": "YFCC15M",
    "lvd142m": "LVD-142M",
    "lvd1689m": "LVD-1689M",
    "ig1b": "Instagram-1B",
    "fb_swsl": "Instagram, YFCC100M",
    "fb_ssl": "YFCC100M",
}


def corpora_in(tag: str) -> str | None:
    """The corpora named in a weights tag, e.g. "ImageNet-21k, ImageNet-1k"; None if it names none."""
    rest, found = tag.lower(), []
    for part, name in CORPORA.items():
        if part in rest:
            found.append(name)
            rest = rest.replace(part, "")
    return ", ".join(found) or None


def pretraining_of(name: str) -> str:
    """The protocol's line about the weights of this name, where the corpus may hold images like the test domains'."""
    return f"weights {name}, pre-trained on {corpora_in(name) or 'a corpus not named'}: {POSSIBLY_SEEN}"


def pretraining_of_file(path: Path) -> str:
    return f"weights from the file {path.name}: {POSSIBLY_SEEN}"
