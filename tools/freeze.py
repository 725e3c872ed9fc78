"""Records what the product does, as text that is the same from run to run, so that a change of its code can be seen.

    python tools/freeze.py record FOLDER [PART…]    parts: recipes, keys, messages, json, models (default: all)
    python tools/freeze.py compare BEFORE AFTER     prints what differs; status 1 if numbers, files or a status do
    python tools/freeze.py texts                    prints the texts of the package that a user may read, the longest first

`record` runs the package that is first on the path: PYTHONPATH=OTHER_CHECKOUT records another one. Times, dates,
versions and paths are replaced by words. One thread computes, as the order of sums depends on their number.
"""

# ruff: noqa: E501 - lists of inputs
from __future__ import annotations

import ast
import contextlib
import csv
import difflib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}

DIGITS = {"data": {"name": "digits"}, "encoder": {"name": "open_clip", "model": "demo", "weights": "demo"}}
TINY = {
    "name": "timm", "model": "resnet10t", "kwargs": {"channels": [8, 16, 16, 32], "stem_width": 8}, "trainable": True,
    "preprocessing": {"size": 32, "crop": 1.0, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
}  # fmt: skip
TRAINING = {"batch_size": 8, "sampler": "per_domain", "steps": 12, "optimizer": "adam", "lr": 3.0e-3,
            "encoder_lr": 1.0e-3, "evaluate_every": 4}  # fmt: skip
ONE_DOMAIN = {"name": "leave_one_domain_out", "test_domains": ["blurred"], "selection": "train_val", "seeds": 2}
FROZEN = ["zero_shot", "linear_probe", "knn", "prototypes", "erm", "groupdro", "rsc", "lisa", "mixup", "fish", "irm",
          "vrex", {"name": "wise_ft", "normalize": True}, "sam", "sagm", "xdomainmix", "xdomainmix+sam", "erm+swad", "erm+bma",
          {"name": "erm", "label": "erm mlp", "head": "mlp"}]  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "bank": {**DIGITS, "protocol": ONE_DOMAIN | {"test_domains": ["blurred", "ink"]}, "methods": FROZEN},
    "end_to_end": {
        "data": {"name": "digits"}, "encoder": TINY, "protocol": ONE_DOMAIN | {"seeds": 1},
        "methods": ["erm", "coral", "irm", "lisa", "mixstyle", "dsu", "fish", "xdomainmix+sam", "erm+swad"],
    },
    "cut": {**DIGITS, "protocol": ONE_DOMAIN, "methods": [
        {"name": "erm", "label": "one block", "trainable": {"blocks": 1}},
        {"name": "xdomainmix", "label": "two blocks", "trainable": {"blocks": 2}}, "zero_shot"]},
    "lora": {"data": {"name": "digits"}, "encoder": DIGITS["encoder"] | {"normalize": True}, "protocol": ONE_DOMAIN, "methods": [
        {"name": "erm", "label": "LoRA", "trainable": {"lora": {"rank": 2, "blocks": 2}}},
        {"name": "clipood", "trainable": {"blocks": 1}}]},
    "search": {**DIGITS, "protocol": ONE_DOMAIN,
               "methods": ["erm", "xdomainmix+sam", "linear_probe"], "search": {"trials": 3, "preset": "frozen"}},
    "encoders": {"data": {"name": "digits"}, "protocol": ONE_DOMAIN, "methods": ["linear_probe", "erm", "xdomainmix"],
                 "encoders": [{"label": "CLIP", **DIGITS["encoder"]},
                              {"label": "ResNet", **{k: v for k, v in TINY.items() if k != "trainable"}}]},
    "official": {"data": {"name": "table", "file": "images/table.csv"}, "encoder": DIGITS["encoder"],
                 "protocol": {"name": "official", "selection": "val_domain", "seeds": 2},
                 "methods": ["zero_shot", "erm", "xdomainmix"]},
    "final_fit": {**DIGITS, "protocol": {"name": "leave_one_domain_out", "selection": "train_val", "seeds": 2,
                                         "final_fit": True}, "methods": ["linear_probe", "erm", "xdomainmix"]},
}  # fmt: skip
KEYS = {
    "folder": {"data": {"name": "folder", "root": "images"}, "encoder": DIGITS["encoder"]},
    "table": {"data": {"name": "table", "file": "images/table.csv"}, "encoder": DIGITS["encoder"]},
    "bf16": {**DIGITS, "features": {"precision": "bf16"}},
    "normalize": {"data": {"name": "digits"}, "encoder": DIGITS["encoder"] | {"normalize": True}},
    "views": {"data": {"name": "folder", "root": "images", "train_augmentation": "domainbed"},
              "encoder": DIGITS["encoder"], "features": {"views": 2}, "methods": ["erm"]},
    "squash": {"data": {"name": "folder", "root": "images"},
               "encoder": DIGITS["encoder"] | {"preprocessing": {"resize": "squash", "crop": 0.9}}},
    "resnet": {"data": {"name": "folder", "root": "images"},
               "encoder": {k: v for k, v in TINY.items() if k != "trainable"}},
    "vit": {"data": {"name": "folder", "root": "images"}, "encoder": {
        "name": "timm", "model": "vit_tiny_patch16_224",
        "kwargs": {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2},
        "preprocessing": {"size": 32, "crop": 1.0}}},
    "vit_pooling": {"data": {"name": "folder", "root": "images"}, "encoder": {
        "name": "timm", "model": "vit_tiny_patch16_224", "pooling": "mean",
        "kwargs": {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2},
        "preprocessing": {"size": 32, "crop": 1.0}}},
    "transformers": {"data": {"name": "folder", "root": "images"},
                     "encoder": {"name": "transformers", "model": "local-dir:vit"}},
    "cut": {"data": {"name": "folder", "root": "images"}, "encoder": DIGITS["encoder"],
            "methods": [{"name": "erm", "trainable": {"blocks": 1}}]},
}  # fmt: skip


def command(*words: str) -> tuple[int, str, str]:
    """Runs `xdm-ft WORDS` in this process. Returns its status, standard output and standard error."""
    from xdm_ft.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(words))
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def write_images(folder: Path) -> None:
    """Writes digits as images in `<domain>/<class>/`, and a table of them with a split."""
    from xdm_ft.data.digits import Digits

    digits, rows = Digits(), []
    for row in range(0, len(digits), 6):
        domain, name = digits.domain_names[digits.domains[row]], digits.class_names[digits.labels[row]]
        path = folder / domain / name / f"{row:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        digits.image(row).save(path)
        part = {"texture": "test", "blurred": "val"}.get(domain, "train")
        rows.append([str(path.relative_to(folder)), name, domain, part])
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "domain", "split"], *rows])


def write_recipe(folder: Path, name: str, recipe: dict[str, Any]) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(
        json.dumps(
            {
                "name": name,
                "training": TRAINING,
                "methods": ["linear_probe"],
                "protocol": {"name": "leave_one_domain_out", "selection": "train_val"},
            }
            | recipe
        )
    )
    return path  # JSON is YAML  # fmt: skip


MEASURED = re.compile(r"second|time|memory|peak|per_s|ms_per|speed|version|commit|host|machine|started|ended|date|duration|"
                      r"^cpu|threads|created|python|torch|xxh|estimate|bytes$|_s$")  # fmt: skip


def stable(value: Any, key: str = "") -> Any:
    """Returns JSON's value without what differs from run to run."""
    if MEASURED.search(key) and not isinstance(value, dict):
        return "measured"
    if isinstance(value, dict):
        return {name: stable(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [stable(item, key) for item in value]
    return words(value) if isinstance(value, str) else value


def words(text: str) -> str:
    """Returns the text with folders of this machine, times and versions replaced."""
    text = text.replace(str(Path.cwd()), "HERE").replace(tempfile.gettempdir(), "TMP")
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?", "DATE", text)
    text = re.sub(r"(/[\w.+-]+)+/(xdm_ft|site-packages)/", r"\2/", text)
    text = re.sub(r"\b\d+(\.\d+)? ?(h|min|s|ms|images/s|GB|MB|kB)\b( \d+ (s|min)\b)?", "AMOUNT", text)
    return re.sub(r"\b\d+(\.\d+)? of AMOUNT free", "AMOUNT free", text)


def tensors(path: Path) -> Iterator[str]:
    """Yields a line for each tensor of a safetensors file, and for its metadata."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            digest = hashlib.sha256(tensor.flatten().view(-1).numpy().tobytes()).hexdigest()[:16] if (
                str(tensor.dtype) != "torch.bfloat16") else hashlib.sha256(
                tensor.view(-1).float().numpy().tobytes()).hexdigest()[:16]  # fmt: skip
            yield f"  {name} {tensor.dtype} {list(tensor.shape)} {digest}"
        for name, text in sorted((file.metadata() or {}).items()):
            if name not in ("checksum", "xxh3", "xxh3_128"):
                with contextlib.suppress(ValueError):
                    text = json.dumps(stable(json.loads(text), name), sort_keys=True)
                yield f"  metadata {name}: {'measured' if MEASURED.search(name) else words(text)}"


def contents(folder: Path) -> Iterator[str]:
    """Yields the files of a folder, with what machines read of them."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = re.sub(r"heads-[0-9a-f]+|events\.out.*", "NAMED", str(path.relative_to(folder)))
        if "tensorboard" in name:
            continue
        yield name
        if path.suffix == ".safetensors":
            yield from tensors(path)
        elif path.suffix == ".json" and path.name != "reports.json":
            yield from json.dumps(stable(json.loads(path.read_text())), indent=1, sort_keys=True).splitlines()
        elif path.suffix == ".csv":
            with path.open(newline="") as rows:
                for row in csv.DictReader(rows):
                    yield words(" ".join(f"{key}={value}" for key, value in row.items() if not MEASURED.search(key)))


def save(folder: Path, name: str, lines: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")


def succeed(*arguments: str) -> str:
    status, out, err = command(*arguments)
    if status:
        raise SystemExit(f"{' '.join(arguments)}: status {status}\n{err}")
    return out


def record_recipes(folder: Path) -> None:
    for name, recipe in RECIPES.items():
        path = write_recipe(Path(), name, recipe)
        succeed("run", str(path), "output.dir=runs")
        save(folder / "recipes", name, contents(Path("runs") / name))
        print(f"recorded recipes/{name}", flush=True)


def record_keys(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.ViTModel(transformers.ViTConfig(**size, image_size=32, patch_size=8))
    model.save_pretrained("vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained("vit")
    lines = []
    for name, recipe in KEYS.items():
        os.environ["XDM_FT_CACHE"] = str(Path(f"cache_{name}").absolute())
        succeed("features", str(write_recipe(Path(), f"key_{name}", recipe)))
        found = {path.parent for path in Path(f"cache_{name}").rglob("*.safetensors")}
        found |= {path.parent for path in Path(f"cache_{name}").rglob("manifest.json")}
        lines += [
            f"{name}: {path.relative_to(f'cache_{name}')}" for path in sorted(found) if "indexes" not in str(path)
        ]
    save(folder, "keys", lines)


def record_models(folder: Path) -> None:
    for run, method in (("bank", "erm"), ("bank", "knn"), ("cut", "one block"), ("lora", "LoRA"),
                        ("end_to_end", "mixstyle"), ("final_fit", None), ("bank", "linear_probe")):  # fmt: skip
        made = f"made_{run}_{method}".replace(" ", "_")
        chosen = [] if method is None else ["--method", method, "--held-out", "blurred", "--seed", "0"]
        succeed("export", f"runs/{run}", made, *chosen)
        succeed("predict", made, "images/blurred", "--probabilities", "--out", f"{made}.csv")
        save(folder / "models", made, [*contents(Path(made)), *Path(f"{made}.csv").read_text().splitlines()])


def record_json(folder: Path) -> None:
    recipe, made = "bank.yaml", "made_bank_erm"
    verbs = {
        "validate": ["validate", recipe], "ls": ["ls", "methods"], "ls_recipes": ["ls", "recipes"],
        "ls_data": ["ls", "data"], "ls_encoders": ["ls", "encoders"], "explain": ["explain", "verdict"],
        "report": ["report", "runs/bank"], "report_two": ["report", "runs/cut", "runs/lora"],
        "analyse": ["analyse", "runs/bank"], "analyse_end_to_end": ["analyse", "runs/end_to_end"],
        "predict": ["predict", made, "images/ink", "--out", "predictions.csv"], "evaluate": ["evaluate", made, "images/ink"],
        "run": ["run", recipe, "output.dir=runs"], "cache": ["cache", "ls"],
        "doctor": ["doctor", recipe],
    }  # fmt: skip
    for name, arguments in verbs.items():
        document = json.dumps(stable(json.loads(succeed(*arguments, "--json"))), indent=1, sort_keys=True)
        save(folder / "json", name, (words(line) for line in document.splitlines()))


def wrong_inputs() -> Iterator[tuple[str, list[str]]]:
    """Yields a name and a command line with a user's mistake."""
    changes = """
        name=a/b; data.name=folders; data.name=folder; data.name=folder data.root=nowhere; data.root=x; data=5
        data.name=table data.file=nowhere.csv; data.name=table data.file=bank.yaml; data.on_bad_image=ask
        data.name=parquet data.file=nowhere; data.name=webdataset data.file=nowhere; data.name=pacs data.root=images
        data.name=camelyon17 data.root=images; data.name=hub data.repository=vlcs; data.name=folder data.root=runs
        encoder.name=clip; encoder.model=nothing; encoder.weights=nothing; encoder.normalize=3; encoder.trainable=maybe
        encoder.pooling=max; encoder.kwargs={depth: 2}; encoder.preprocessing={size: 0}; encoder.preprocessing={sizes: 3}
        encoder.name=timm encoder.model=resnet9999; encoder.name=timm encoder.model=resnet10t encoder.weights=nowhere
        encoder.batch_norm=frozen; encoder.trainable=true encoder.weights=null; encoder.lora=3
        protocol.name=loo; protocol.test_domains=[pencil]; protocol.test_domains=[]; protocol.seeds=0
        protocol.selection=best; protocol.selection=val_domain; protocol.name=official; protocol.val_fraction=2
        protocol.final_fit=3; protocol.selection=oracle protocol.final_fit=true; protocol.split_rule=other
        protocol.metric=f1; protocol.seeds=many; protocol.test_domains=[ink, ink]; protocol.holdout=1
        methods=[erms]; methods=[]; methods=erm+smad; methods=[erm, erm]; methods=[coral]; methods=[dsu]; methods=[mixstyle]
        methods=[{name: erm, momentum: 3}]; methods=[{name: irm, penalty_weight: -1}]; methods=[{label: a}]
        methods=[{name: erm, head: linears}]; methods=[{name: erm, head: mlp, mlp.hidden_width: 0}]; methods=[fish+sam]
        methods=[{name: erm, sam.rho: 1}]; methods=[{name: xdomainmix, warmup_steps: -5}]; methods=[zero_shot+sam]
        methods=[{name: erm, trainable: {blocks: 99}}]; methods=[{name: erm, trainable: {lora: {rank: 0}}}]
        methods=[{name: lisa, mix: cutmix}]; methods=[{name: xdomainmix, p_discard: 2}]; methods=[clipood]
        methods=[{name: knn, neighbours: [0]}]; methods=[{name: erm, head_init: text}]; methods=[{name: 3}]
        training.steps=0; training.steps=1.5; training.step=5; training.batch_size=0; training.lr=-1; training.lr=fast
        training.optimizer=lion; training.sampler=random; training.epochs=2; training.momentum=0.9; training.clip_norm=0
        training.evaluate_every=0; training.evaluate_every=999; training.loss_average=class; training.weight_decay=-1
        training.schedule=linear; training.warmup=2; training.batch_size=5000; training.precision=fp8
        search.trials=0; search.trials=3 search.preset=none; search={ranges: {lr: {choice: []}}}
        search={ranges: {lrs: {choice: [1]}}}; search={ranges: {lr: {uniform: [1]}}}; search=5
        features.precision=fp64; features.views=-1; features.batch_size=0; features.cache=nowhere
        report.compare=[[erm, irms]]; report.margin=2; report.page=5; report.baseline=x; output.dirs=a; output.dir=5
        output.tensorboard=maybe; output=3; cluster.address=x; run.threads=0; unknown=1; training.=3; =3; x
    """
    for change in filter(None, (part.strip() for part in re.split(r"[;\n]", changes))):
        parts = re.split(r" (?=[a-z_.]+=)", change)
        yield change, ["validate", "bank.yaml", *parts]
    for name, text in {
        "empty": "", "list": "[1, 2]", "tab": "name:\ta\n\tb: 1", "twice": "name: a\nname: b", "binary": "\0\1",
        "open": "methods: [erm", "anchor": "a: &x 1\nb: *y", "no methods": "data: {name: digits}", "scalar": "erm",
    }.items():  # fmt: skip
        Path(f"wrong_{name.replace(' ', '_')}.yaml").write_text(text)
        yield f"recipe {name}", ["validate", f"wrong_{name.replace(' ', '_')}.yaml"]
    lines = """
        runs; run; run nowhere; run images; validate nowhere.yaml; run bank.yaml x; run demos; export; export nowhere
        export runs/bank; export runs/bank made_bank_erm; export runs/bank x --method erms
        export runs/bank x --method erm; export runs/bank x --method erm --held-out ink --seed 9
        report nowhere; report images; report runs/bank runs/nowhere; report runs/bank runs/bank; report runs/bank --format x
        analyse nowhere; analyse images; analyse runs/bank --method x; predict nowhere images; predict made_bank_erm
        predict made_bank_erm nowhere; predict made_bank_erm runs; predict runs/bank images; evaluate made_bank_erm nowhere
        evaluate made_bank_erm images; evaluate nowhere images/ink
        cache lists; cache remove; cache verify extra; ls nothing; cp nothing x.yaml; cp demo bank.yaml; explain nothing
        doctor nowhere.yaml; features nowhere.yaml; completion fishes; --nothing; run demo --quiets; run demo --json=3
    """
    for line in filter(None, (part.strip() for part in re.split(r"[;\n]", lines))):
        yield line, line.split()


def record_messages(folder: Path) -> None:
    lines = []
    for name, arguments in wrong_inputs():
        status, _, err = command(*arguments)
        last = err.strip().splitlines()[-1:] or [""]
        lines.append(f"{name} | {status} | {words(last[0])}")
    save(folder, "messages", lines)


PARTS: dict[str, Callable[[Path], None]] = {
    "recipes": record_recipes, "models": record_models, "json": record_json, "messages": record_messages,
    "keys": record_keys,
}  # fmt: skip


def record(folder: Path, parts: Iterable[str]) -> None:
    import torch

    folder = folder.absolute()
    work = Path(tempfile.gettempdir()) / "xdm_ft_freeze"  # one name, as paths are parts of numbers' seeds and messages
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    os.chdir(work)
    torch.set_num_threads(1)
    os.environ["XDM_FT_CACHE"] = str(work / "cache")
    write_images(Path("images"))
    for part in parts:
        PARTS[part](folder)
        print(f"recorded {part}", flush=True)


def compare(before: Path, after: Path) -> int:
    """Prints what differs. Returns 1 if anything but words of messages does."""
    names = sorted({str(path.relative_to(root)) for root in (before, after) for path in root.rglob("*.txt")})
    faults = 0
    for name in names:
        old, new = (
            (root / name).read_text().splitlines() if (root / name).exists() else [] for root in (before, after)
        )
        if not old or not new:
            print(f"{name}: only {'after' if not old else 'before'}")
            continue
        if name == "messages.txt":
            then = dict(line.split(" | ", 1) for line in old)
            for line in new:
                case, now = line.split(" | ", 1)
                was = then.get(case, now)
                if was != now:
                    fault = was.split(" | ")[0] != now.split(" | ")[0]
                    faults += fault
                    print(f"{'FAULT' if fault else 'words'} {case}\n  - {was}\n  + {now}")
            continue
        difference = list(difflib.unified_diff(old, new, lineterm="", n=0))
        if difference:
            faults += 1
            print(f"{name}: {len(difference)} lines\n  " + "\n  ".join(line[:300] for line in difference[:40]))
    print(f"{faults} faults in {len(names)} files")
    return min(faults, 1)


def texts(package: Path) -> Iterator[tuple[str, str]]:
    """Yields (file:line, text) of every string of four words or more that is not a docstring; values are {…}."""

    def text_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(text_of(part) or "{…}" for part in node.values)
        return None

    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                text = text_of(child)
                inside = isinstance(node, ast.Expr | ast.JoinedStr)  # a docstring, or a part of a text
                if text and not inside and len(text.split()) > 3:
                    yield f"{path.relative_to(package)}:{child.lineno}", text


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "texts":
        package = Path(__file__).resolve().parents[1] / "xdm_ft"
        for where, text in sorted(texts(package), key=lambda item: -len(item[1])):
            print(f"{len(text)} {where} {text!r}")
        sys.exit()
    if verb == "record":
        record(Path(rest[0]), rest[1:] or PARTS)
    else:
        sys.exit(compare(Path(rest[0]), Path(rest[1])))
