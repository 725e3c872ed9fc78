"""Files of features as tools for slides write them: TRIDENT, CLAM and torchmil."""

import json
from pathlib import Path

import numpy as np
import torch


def trident(path: Path, features: np.ndarray) -> Path:
    """As TRIDENT: chunks of one row, axes that may grow, attributes as texts; a slide encoder's features are [K]."""
    import h5py

    assets = {"features": features, "coords": np.zeros((len(features), 2), np.int64)}
    attributes = {
        "patch_size": 256,
        "target_magnification": 20,
        "encoder": "uni_v1",
        "options": json.dumps({"a": None}),
    }
    with h5py.File(path, "w") as file:
        for name, values in assets.items():
            rest = values.shape[1:]
            written = file.create_dataset(
                name, shape=values.shape, maxshape=(None, *rest), chunks=(1, *rest), dtype=values.dtype
            )
            written[:] = values
            written.attrs.update(attributes)
    return path


def clam(path: Path, features: np.ndarray, batch: int = 4) -> Path:
    """As CLAM: the first batch makes the arrays, each other one makes them longer."""
    import h5py

    for start in range(0, len(features), batch):
        z = features[start : start + batch].astype(np.float32)
        with h5py.File(path, "a" if start else "w") as file:
            for name, values in {"features": z, "coords": np.zeros((len(z), 2), np.int32)}.items():
                if name in file:
                    file[name].resize(len(file[name]) + len(values), axis=0)
                    file[name][-len(values) :] = values
                else:
                    rest = values.shape[1:]
                    file.create_dataset(name, data=values, maxshape=(None, *rest), chunks=(1, *rest))
    return path


def clam_pt(path: Path, features: np.ndarray) -> Path:
    torch.save(torch.from_numpy(features), path)
    return path


def torchmil(path: Path, features: np.ndarray) -> Path:
    np.save(path, features)
    return path


def slides(folder: Path, per_class: int = 4, write=torchmil, suffix: str = ".npy", seed: int = 0) -> Path:
    """Writes bags of two classes at three sites, two slides of each patient, and their table. Returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, random = ["slide,label,domain,group"], np.random.default_rng(seed)
    for number in range(6 * per_class):
        label, site = divmod(number // per_class, 3)
        size = int(random.integers(3, 9))
        z = random.normal(size=(size, 5)) + label * (1 + np.arange(5) % 2) + site / 4
        write(folder / f"slide.{number}{suffix}", z.astype(np.float32))
        rows.append(f"slide.{number},{['normal', 'tumor'][label]},site{site},patient{number // 2}")
    table = folder / "slides.csv"
    table.write_text("\n".join(rows) + "\n")
    return table
