"""Small runs of every kind, for the soak: images of 32 px, few steps, a second each."""

from __future__ import annotations

from pathlib import Path

import miniature
import timm
import torch
from safetensors.torch import save_file

DATA = "{{name: pacs, root: {data}, counts: any{augmentation}}}"
TIMM = "{{name: timm, model: test_vit, weights: {weights}, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}"
END_TO_END = TIMM.replace("kwargs", "trainable: true, kwargs")
RECIPE = """\
name: small
data: {data}
protocol: {{name: leave_one_domain_out, test_domains: [{test_domains}], seeds: {seeds}{protocol}}}
encoder: {encoder}
features: {{batch_size: 16, workers: 0{features}}}
methods: {methods}
{search}training: {{steps: {steps}, batch_size: 4, evaluate_every: 4}}
report: {{page: false}}
"""
DEFAULTS = {
    "encoder": TIMM, "methods": "[erm, xdomainmix]", "test_domains": "sketch, photo", "protocol": "", "features": "",
    "search": "", "augmentation": "", "steps": 8, "seeds": 1,
}  # fmt: skip
SCENARIOS: dict[str, dict[str, object]] = {
    "frozen": {
        "encoder": "{{name: open_clip, model: demo, weights: demo}}",
        "methods": "[zero_shot, linear_probe, erm, xdomainmix, xdomainmix+sam]",
    },
    "end to end": {"encoder": END_TO_END, "methods": "[erm, xdomainmix+swad]", "test_domains": "sketch", "steps": 6},
    "search": {"methods": "[linear_probe, erm, xdomainmix+sam]", "search": "search: {trials: 3, preset: frozen}\n"},
    "cross_domain": {"protocol": ", selection: cross_domain"},
    "final_fit": {"protocol": ", final_fit: all_seeds", "seeds": 2, "methods": "[erm, rsc, xdomainmix+swad]"},
    "views": {"features": ", views: 2", "augmentation": ", train_augmentation: domainbed"},
}


def write(name: str, folder: Path, weights: Path | None = None) -> Path:
    """Returns the recipe file of a scenario. Its images are written beside it, and there too the encoder's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").exists():
        miniature.domainbed(folder / "data", "pacs", per_class=3)
    weights = weights or folder / "weights.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=0, img_size=32).state_dict(), weights)
    keys = DEFAULTS | SCENARIOS[name]
    keys["encoder"] = str(keys["encoder"]).format(weights=weights)
    keys["data"] = DATA.format(data=folder / "data", augmentation=keys["augmentation"])
    (folder / "small.yaml").write_text(RECIPE.format(**keys))
    return folder / "small.yaml"
