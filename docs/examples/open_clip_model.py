"""Loads a CLIP model directory into open_clip, and uses the head as class embeddings.

The head must be a cosine head, or a linear one on normalised features. Embeddings include the temperature.
"""

import json
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from PIL import Image

import xdm_ft

folder = Path("clip_model")
settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["encoder"]["settings"]
name = settings["model"]
if name.endswith(".json"):
    open_clip.add_model_config(folder / name)
    name = Path(name).stem
clip = open_clip.create_model(name, pretrained=str(folder / "encoder.safetensors"), **settings["kwargs"]).eval()

model = xdm_ft.load("clip_model", device="cpu")
embeddings, scale, bias = model.class_embeddings()  # [C,K], a number, [C]
pixels = torch.stack([model.transform(Image.open(path).convert("RGB")) for path in ["a.png", "b.png"]])
with torch.no_grad():
    z = F.normalize(clip.encode_image(pixels), dim=-1)  # [2,K]
clip_probabilities = (scale * z @ embeddings.T + bias).softmax(-1)
