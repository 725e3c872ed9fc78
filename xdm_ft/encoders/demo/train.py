"""Trains the tiny CLIP of the demo: `python -m xdm_ft.encoders.demo.train` writes weights and model card.

It trains on the training parts of three digit styles. It never reads the style `HELD_OUT`, any scan of that style, nor
the validation parts of the three. The loss is CLIP's (Radford et al. 2021) with every true caption in the batch as a
positive, as in UniCL (Yang et al. 2022): with ten classes, most batches hold the same caption several times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.data import ImageDataset
from xdm_ft.data._transforms import evaluation_transform
from xdm_ft.encoders._clip_source import DEMO
from xdm_ft.progress import progress

HELD_OUT = "blurred"
SEED = 0
STEPS = 800
BATCH = 128
LEARNING_RATE = 2e-3
WARMUP = 100  # steps
WEIGHT_DECAY = 0.1  # of matrices
MAX_LOGIT_SCALE = 100.0
ROTATION, SHIFT, SCALE = (
    math.radians(15),
    0.12,
    0.12,
)  # largest angle, shift (as a fraction of half the side) and change of size
CONTRAST, COLOUR = 0.3, 0.15  # largest change of contrast and of each channel's brightness
CONFIG, WEIGHTS, CARD = "demo_clip.json", "demo_clip.safetensors", "README.md"
PARTS = {"train": ["train"], "val": ["val"], "all": ["train", "val"]}  # column → splits

PLAIN = (
    "a photo of a {}", "a {}", "the digit {}", "the number {}", "a handwritten {}", "a picture of the number {}",
)  # fmt: skip
STYLED = ("a {} in {}", "a photo of a {} in {}")
STYLE_WORDS = {
    "ink": "ink on paper",
    "chalk": "chalk on a coloured board",
    "blurred": "a blurred grey photograph",
    "texture": "one colour on a noisy ground",
}


class Captions(NamedTuple):
    """All T captions, and the class and style of the images that each describes."""

    texts: list[str]
    classes: Tensor  # int64 [T]
    styles: Tensor  # int64 [T], −1: any style

    def true_of(self, labels: Tensor, styles: Tensor) -> Tensor:
        """bool [B,T]: whether each caption is true of each image, of `labels` and `styles` int64 [B]."""
        any_style = self.styles < 0
        return (self.classes == labels[:, None]) & (any_style | (self.styles == styles[:, None]))


def training_rows(dataset: ImageDataset) -> np.ndarray:
    """Rows of the training parts of the source styles, int64 [n]."""
    assert dataset.splits is not None
    held_out = dataset.domain_names.index(HELD_OUT)
    return np.flatnonzero((dataset.splits == "train") & (dataset.domains != held_out))


def fingerprint(dataset: ImageDataset, rows: np.ndarray) -> str:
    """SHA-256 of the row numbers and of the pixels in them."""
    digest = hashlib.sha256(rows.astype("<i8").tobytes())
    for row in rows:
        digest.update(np.asarray(dataset.image(row)).tobytes())
    return digest.hexdigest()


def captions(dataset: ImageDataset) -> Captions:
    """Plain captions for every class, styled ones for every class in every source style."""
    texts, classes, styles = [], [], []
    for label, word in enumerate(dataset.class_names):
        sentences = [(template.format(word), -1) for template in PLAIN]
        for style, name in enumerate(dataset.domain_names):
            if name != HELD_OUT:
                sentences += [(template.format(word, STYLE_WORDS[name]), style) for template in STYLED]
        texts += [text for text, _ in sentences]
        classes += [label] * len(sentences)
        styles += [style for _, style in sentences]
    return Captions(texts, torch.tensor(classes), torch.tensor(styles))


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images [B,3,32,32] in 0…1, each slightly rotated, shifted, scaled, with other contrast and colour."""
    n = len(images)

    def draw(*shape: int) -> Tensor:  # uniform in −1…1
        return 2 * torch.rand(n, *shape, generator=generator) - 1

    angle, scale, shift = ROTATION * draw(), 1 + SCALE * draw(), SHIFT * draw(2)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    affine = torch.stack([cos, -sin, shift[:, 0], sin, cos, shift[:, 1]], dim=1).view(n, 2, 3)
    grid = torch.nn.functional.affine_grid(affine, list(images.shape), align_corners=False)
    moved = torch.nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return ((moved - 0.5) * (1 + CONTRAST * draw(1, 1, 1)) + 0.5 + COLOUR * draw(3, 1, 1)).clamp(0, 1)


def contrastive_loss(image_features: Tensor, text_features: Tensor, scale: Tensor, positive: Tensor) -> Tensor:
    """Mean of the cross-entropies image → text and text → image. The target of a row is uniform over its positives.

    `positive`: bool [B,B], whether the text (column) is true of the image (row).
    """
    logits = scale * image_features @ text_features.T  # [B,B]
    losses = []
    for scores, true in ((logits, positive), (logits.T, positive.T)):
        target = true / true.sum(dim=1, keepdim=True)
        losses.append(-(target * scores.log_softmax(dim=1)).sum(dim=1).mean())
    return (losses[0] + losses[1]) / 2


def batches(n: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """`steps` batches of positions in 0…n−1 from successive permutations."""
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.cat([order, torch.randperm(n, generator=generator)])
        yield order[:BATCH]
        order = order[BATCH:]


def optimizer_of(model: torch.nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and its schedule: linear warm-up, then a cosine to 0."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    return optimizer, schedule


def train(model: Any, tokenizer: Any, dataset: ImageDataset, rows: np.ndarray, steps: int) -> None:
    """Trains an open_clip model on the images of `rows` in place."""
    generator = torch.Generator().manual_seed(SEED)
    pixels = np.stack([np.asarray(dataset.image(row)) for row in rows])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255  # [n,3,32,32]
    labels, styles = torch.from_numpy(dataset.labels[rows]), torch.from_numpy(dataset.domains[rows])
    all_captions = captions(dataset)
    tokens = tokenizer(all_captions.texts)
    mean, std = (torch.tensor(model.visual.preprocess_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    optimizer, schedule = optimizer_of(model, steps)
    model.train()
    with progress("training the demo CLIP", steps, "steps") as bar:
        for batch in batches(len(rows), steps, generator):
            true = all_captions.true_of(labels[batch], styles[batch])  # [B,T]
            chosen = torch.multinomial(true.float(), 1, generator=generator)[:, 0]  # a true caption per image
            x = (augment(images[batch], generator) - mean) / std
            image_features = model.encode_image(x, normalize=True)
            unique, position = chosen.unique(return_inverse=True)  # each caption is encoded once
            text_features = model.encode_text(tokens[unique], normalize=True)[position]
            loss = contrastive_loss(image_features, text_features, model.logit_scale.exp(), true[:, chosen])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            with torch.no_grad():  # as in CLIP: a larger scale makes training unstable
                model.logit_scale.clamp_(max=math.log(MAX_LOGIT_SCALE))
            bar.advance(1, f"loss {loss.item():.3f}")


def zero_shot_accuracy(dataset: ImageDataset, folder: Path) -> dict[str, dict[str, float]]:
    """{style: {part (train, val, all): zero-shot accuracy}} of the model in `folder`, used as in the demo's recipe."""
    from xdm_ft.encoders.open_clip import OpenClip

    assert dataset.splits is not None
    encoder = OpenClip(model=str(folder / CONFIG), weights=str(folder / WEIGHTS), normalize=True)
    transform = evaluation_transform(encoder.preprocessing)
    classifier = encoder.text_embeddings(dataset.class_names)  # [C,K]
    with torch.no_grad():
        images = torch.stack([transform(dataset.image(row)) for row in range(len(dataset))])
        predicted = torch.cat([(encoder(part) @ classifier.T).argmax(1) for part in images.split(256)]).numpy()
    correct = predicted == dataset.labels
    return {
        name: {
            part: float(correct[(dataset.domains == style) & np.isin(dataset.splits, splits)].mean())
            for part, splits in PARTS.items()
        }
        for style, name in enumerate(dataset.domain_names)
    }


def save(model: Any, dataset: ImageDataset, rows: np.ndarray, steps: int, folder: Path) -> None:
    """Writes the weights in float16; the header of the file lists the images that they were trained on."""
    from safetensors.torch import save_file

    sources = sorted({dataset.domain_names[style] for style in dataset.domains[rows]})
    seen = {
        "held_out_style": HELD_OUT,
        "source_styles": ", ".join(sources),
        "training_images": len(rows),
        "training_images_sha256": fingerprint(dataset, rows),
        "seed": SEED,
        "steps": steps,
    }
    state = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(
        state, folder / WEIGHTS, metadata={"seen": json.dumps(seen)}
    )  # one key: the library orders several at random


def card(accuracy: dict[str, dict[str, float]], images: int, steps: int, megabytes: float) -> str:
    """The model card: the weights, the images that they were trained on, and the measured accuracies."""
    rows = [
        f"| {style} | {'never' if style == HELD_OUT else 'train part'} | "
        + " | ".join(f"{100 * parts[part]:.1f}" for part in PARTS)
        + " |"
        for style, parts in accuracy.items()
    ]
    return CARD_TEMPLATE.format(
        held_out=HELD_OUT, images=images, steps=steps, megabytes=megabytes, seed=SEED, table="\n".join(rows)
    )


CARD_TEMPLATE = """# The demo's CLIP

A toy, so that the demo needs no download: an open_clip model for images of 32 px (a ViT of 4 layers, a text tower of
width 16; float16, {megabytes:.2f} MB) that knows handwritten digits and nothing else. Use it as
`encoder: {{name: open_clip, model: demo, weights: demo}}`.

It was trained by

    python -m xdm_ft.encoders.demo.train

(seed {seed}, {steps} steps, two minutes on a free core; the same machine and versions give the same file) on {images}
images of the `digits` data: the training parts of three styles, with captions made from their class and style. The
style **{held_out}**, all of its scans, and the validation parts of the other three were never read. The header of the
weights file holds a SHA-256 of the rows and pixels that were read; a test compares it with the data.

Zero-shot accuracy in percent with the one prompt "a photo of a {{}}", of the file as it is shipped:

| style | seen in training | train part | val part | all |
|---|---|---|---|---|
{table}

The script prints these numbers and writes this page.
"""


def main() -> None:
    import open_clip

    from xdm_ft.data.digits import Digits

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEMO, help="folder to write to (default: the package)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    arguments = parser.parse_args()
    folder, steps = arguments.folder, arguments.steps
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() != DEMO:
        shutil.copyfile(DEMO / CONFIG, folder / CONFIG)

    logging.basicConfig(format="%(message)s")
    logging.getLogger("xdm_ft").setLevel(logging.INFO)
    torch.set_num_threads(1)  # the order of sums must not depend on the number of cores
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    dataset = Digits()
    rows = training_rows(dataset)
    print(f"{len(rows)} training images of {len(dataset)}; held out: {HELD_OUT}")
    open_clip.add_model_config(folder / CONFIG)
    name = Path(CONFIG).stem
    model = open_clip.create_model(name)
    train(model, open_clip.get_tokenizer(name), dataset, rows, steps)
    save(model, dataset, rows, steps, folder)
    accuracy = zero_shot_accuracy(dataset, folder)
    for style, parts in accuracy.items():
        print(f"zero-shot, {style}: " + ", ".join(f"{100 * parts[part]:.1f}% {part}" for part in PARTS))
    megabytes = (folder / WEIGHTS).stat().st_size / 1e6
    (folder / CARD).write_text(card(accuracy, len(rows), steps, megabytes), encoding="utf-8")


if __name__ == "__main__":
    main()
