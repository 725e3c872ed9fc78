"""Predicts with model.onnx, which holds the preprocessing (`resize: native`), without torch; Pillow resizes."""

import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession("onnx_model/model.onnx", providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
class_names, how = json.loads(about["class_names"]), json.loads(about["preprocessing"])


def resized(path):
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith(("I", "F")) or image.has_transparency_data:
        raise SystemExit(f"{path}: this program reads neither more than 8 bits nor transparency, unlike xdm_ft")
    image = image.convert("RGB")
    side, short = int(how["size"] / how["crop"]), min(image.size)
    width, height = (int(side * length / short) for length in image.size)
    image = image.resize((width, height), Image.Resampling[how["interpolation"].upper()])
    left, top = round((width - how["size"]) / 2), round((height - how["size"]) / 2)
    return np.asarray(image.crop((left, top, left + how["size"], top + how["size"])))


images = np.stack([resized(path) for path in ["a.png", "b.png"]])  # uint8 [2,size,size,3]
[onnx_probabilities] = session.run(["probabilities"], {"images": images})
print([class_names[number] for number in onnx_probabilities.argmax(1)])
