"""Loads the encoder of a model directory into timm, and with a linear head the whole classifier.

The classifier needs `normalize: false` in config.json. Its logits are those before the temperature.
"""

import json
from pathlib import Path

import timm
from safetensors.torch import load_file

about = json.loads(Path("timm_model/config.json").read_text(encoding="utf-8"))
name, kwargs = about["encoder"]["settings"]["model"], about["encoder"]["settings"]["kwargs"]
network = timm.create_model(name, num_classes=0, checkpoint_path="timm_model/encoder.safetensors", **kwargs).eval()

head = load_file("timm_model/model.safetensors")
classifier = timm.create_model(name, num_classes=0, checkpoint_path="timm_model/encoder.safetensors", **kwargs).eval()
classifier.reset_classifier(len(about["class_names"]))
classifier.get_classifier().load_state_dict({"weight": head["head.weight"], "bias": head["head.bias"]})
