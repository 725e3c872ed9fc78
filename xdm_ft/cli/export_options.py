"""The options of `xdm-ft export`. Nothing heavy is imported before the verb is called."""

from __future__ import annotations

import argparse

from xdm_ft.cli.answer import Answer
from xdm_ft.cli.model_choice import add_choice, choice_of


def add(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_dir", metavar="RUN_DIR")
    sub.add_argument("dir", metavar="DIR", help="a new directory")
    best = "the final fit on all images, trained now if it was not (the default, but for official splits)"
    sub.add_argument("--best", action="store_true", help=best)
    add_choice(sub)
    encoder = sub.add_mutually_exclusive_group()
    include = "include all weights of the encoder (default: only if they came from a file)"
    encoder.add_argument("--with-encoder", action="store_true", default=None, help=include)
    leave_out = "leave out weights of the encoder that were not trained; if they came from a file, loading needs it"
    encoder.add_argument("--without-encoder", action="store_false", dest="with_encoder", default=None, help=leave_out)
    wise = "mean of trained (α) and zero-shot (1 − α) weights, of a method that started from class embeddings"
    sub.add_argument("--wise-ft", type=float, metavar="α", help=wise)
    sub.add_argument("--ensemble", action="store_true", help="the heads of all seeds, averaged")
    fitted = "divide the logits by the temperature that was fitted on validation parts of the training domains"
    sub.add_argument("--temperature", action="store_true", help=fitted)
    sub.add_argument("--onnx", action="store_true", help="also write model.onnx, checked against torch")
    inside = "like --onnx, for uint8 images that are resized already: normalisation is inside the file"
    sub.add_argument("--onnx-preprocessing", action="store_true", help=inside)
    sub.add_argument("--push-to-hub", metavar="ORG/NAME", help="upload the directory to the Hugging Face hub")
    features = "let --push-to-hub upload a head that holds features of training images"
    sub.add_argument("--allow-training-features", action="store_true", help=features)
    hashes = "--push-to-hub uploads the checksums of the training images too (default: they stay here)"
    sub.add_argument("--with-training-hashes", action="store_true", help=hashes)
    sub.add_argument("--private", action="store_true", help="make a new repository of --push-to-hub private")


def called(arguments: argparse.Namespace) -> Answer:
    """Performs the verb. Raises `UserError`."""
    from xdm_ft.cli.export import export_model

    return export_model(
        arguments.run_dir,
        arguments.dir,
        choice_of(arguments),
        best=arguments.best,
        with_encoder=arguments.with_encoder,
        wise_ft=arguments.wise_ft,
        ensemble=arguments.ensemble,
        temperature=arguments.temperature,
        onnx=arguments.onnx,
        onnx_preprocessing=arguments.onnx_preprocessing,
        push_to_hub=arguments.push_to_hub,
        private=arguments.private,
        allow_training_features=arguments.allow_training_features,
        with_training_hashes=arguments.with_training_hashes,
    )
