"""Trains the tiny CLIP of the demo: `python tools/demo_clip/train.py` writes weights and model card.

It trains on printed digits alone (`printed.py` beside it), new ones in every step, so that the handwritten
digits of the demo are new to it. The loss is CLIP's (Radford et al. 2021) with every true caption in the batch as a
positive, as in UniCL (Yang et al. 2022): with ten digits, most batches hold the same caption several times.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from printed import HELD_OUT_FONTS, TRAINING_FONTS, WORDS, Printer, captions
from torch import Tensor

from xdm_ft.encoders.open_clip import DEMO
from xdm_ft.runtime.progress import progress

SEED = 0
STEPS = 2500
BATCH = 64
LEARNING_RATE = 2e-3
WARMUP = 200  # steps
WEIGHT_DECAY = 0.1  # of matrices
MAX_LOGIT_SCALE = 100.0
PER_FONT = 500  # images of each font that measure accuracy
CONFIG, WEIGHTS, CARD = "demo_clip.json", "demo_clip.safetensors", "README.md"


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


def optimizer_of(model: torch.nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and its schedule: linear warm-up, then a cosine to 0."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    return optimizer, schedule


def train(model: Any, tokenizer: Any, steps: int) -> None:
    """Trains an open_clip model in place."""
    generator = torch.Generator().manual_seed(SEED)
    printer, all_captions = Printer(TRAINING_FONTS), captions()
    tokens = tokenizer(all_captions.texts)
    mean, std = (torch.tensor(model.visual.preprocess_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    optimizer, schedule = optimizer_of(model, steps)
    model.train()
    with progress("training the demo CLIP", steps, "steps") as bar:
        for _ in range(steps):
            images = printer.images(BATCH, generator)
            true = all_captions.true_of(images)  # [B,T]
            chosen = torch.multinomial(true.float(), 1, generator=generator)[:, 0]  # a true caption per image
            image_features = model.encode_image((images.pixels - mean) / std, normalize=True)
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


def zero_shot_accuracy(folder: Path) -> dict[str, float]:
    """{font: zero-shot accuracy} of the model in `folder`, used as in the demo's recipe, on fonts held out."""
    from torchvision.transforms.functional import to_pil_image

    from xdm_ft.encoders.open_clip import OpenClip
    from xdm_ft.images.transforms import evaluation_transform

    encoder = OpenClip(model=str(folder / CONFIG), weights=str(folder / WEIGHTS), normalize=True)
    transform = evaluation_transform(encoder.preprocessing)
    classifier = encoder.text_embeddings(WORDS)  # [C,K]
    accuracy = {}
    for font in HELD_OUT_FONTS:
        images = Printer([font]).images(PER_FONT, torch.Generator().manual_seed(SEED))
        with torch.no_grad():
            z = encoder(torch.stack([transform(to_pil_image(pixels)) for pixels in images.pixels]))
        accuracy[font.name] = float(((z @ classifier.T).argmax(1) == images.labels).float().mean())
    return accuracy


def seen(steps: int) -> dict[str, Any]:
    """Returns what weights are trained on in so many steps."""
    return {
        "images": "printed digits",
        "fonts": [f"{font.name} U+{font.zero:04X}" for font in TRAINING_FONTS],
        "number_of_images": steps * BATCH,
        "seed": SEED,
        "steps": steps,
    }


def save(model: Any, steps: int, folder: Path) -> None:
    """Writes the weights in float16; the header of the file says what they were trained on."""
    from safetensors.torch import save_file

    state = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    # one key: the library orders several at random
    save_file(state, folder / WEIGHTS, metadata={"seen": json.dumps(seen(steps))})


def card(accuracy: dict[str, float], steps: int, megabytes: float, minutes: float) -> str:
    """The model card: the weights, the images that they were trained on, and the measured accuracies."""
    return CARD_TEMPLATE.format(
        images=steps * BATCH, steps=steps, fonts=len(TRAINING_FONTS), megabytes=megabytes, minutes=minutes, seed=SEED,
        per_font=PER_FONT, table="\n".join(f"| {font} | {100 * value:.1f} |" for font, value in accuracy.items()),
    )  # fmt: skip


CARD_TEMPLATE = """# The demo's CLIP

A toy, so that the demo needs no download: an open_clip model for images of 32 px (a ViT of 4 blocks and width 64, a
text tower of width 16; float16, {megabytes:.2f} MB) that knows printed digits and nothing else. Use it as
`encoder: {{name: open_clip, model: demo, weights: demo}}`.

It was trained by

    python tools/demo_clip/train.py

(seed {seed}, {steps} steps, {minutes:.0f} minutes of one core; the same machine and versions give the same file) on
{images:,} images of printed digits, no two of them the same: {fonts} typefaces among matplotlib's fonts (DejaVu, STIX,
Computer Modern), random sizes, places, colours and grounds, slight rotations, and captions such as "a photo of a seven
in a serif font". It has never seen handwriting: to it, the `digits` data are new. `recipes/demo.yaml` states its
zero-shot accuracy there.

Zero-shot accuracy in percent with the one prompt "a photo of a {{}}", of the file as it is shipped, on {per_font}
printed digits in each of four fonts that it was not trained on (Aileron comes with Pillow):

| font | accuracy |
|---|---|
{table}

The script prints these numbers and writes this page.
"""


def main() -> None:
    import open_clip

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
    open_clip.add_model_config(folder / CONFIG)
    name = Path(CONFIG).stem
    model = open_clip.create_model(name)
    train(model, open_clip.get_tokenizer(name), steps)
    minutes = time.process_time() / 60  # of one core, as there is one thread
    save(model, steps, folder)
    accuracy = zero_shot_accuracy(folder)
    for font, value in accuracy.items():
        print(f"zero-shot, {font}: {100 * value:.1f}%")
    megabytes = (folder / WEIGHTS).stat().st_size / 1e6
    (folder / CARD).write_text(card(accuracy, steps, megabytes, minutes), encoding="utf-8")


if __name__ == "__main__":
    main()
