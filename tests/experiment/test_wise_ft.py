"""WiSE-FT in a whole run: one end of its curve is zero-shot, the other ERM from the class embeddings."""

import json
from pathlib import Path

import open_clip
import pytest
import small_runs
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_folder", "few_digits")]
TINY = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
RECIPE = """\
name: small
data: {name: digits}
protocol: {name: leave_one_domain_out, test_domains: [ink], seeds: 2}
encoder: {name: open_clip, model: ./wise_clip.json, weights: ./wise_clip.safetensors, normalize: true}
features: {dir: features, workers: 0}
methods: [zero_shot, {name: erm, head_init: zero_shot}, wise_ft, {name: wise_ft, alpha: 0.5, label: half}]
training: {batch_size: 16, steps: 20, lr: 5.0, encoder_lr: 1.0e-3}
report: {page: false}
"""
RUN = Path("output/small")
HALF = "{name: wise_ft, alpha: 0.5, label: half}"
ZERO, START = "zero_shot", "{name: erm, head_init: zero_shot}"


def results(*overrides, methods=None):
    Path("wise_clip.json").write_text(json.dumps(TINY))
    open_clip.add_model_config("wise_clip.json")
    torch.manual_seed(0)
    weights = open_clip.create_model("wise_clip").state_dict()
    save_file({name: value.contiguous() for name, value in weights.items()}, "wise_clip.safetensors")
    Path("wise.yaml").write_text(RECIPE)
    rows = () if methods is None else (f"methods=[{', '.join(methods)}]",)
    return small_runs.results_of(small_runs.load("wise.yaml", [*overrides, *rows]))


def selected(content, method, seed=0):
    [record] = [record for record in content["runs"] if record["method"] == method and record["seed"] == seed]
    assert record["status"] == "ok"
    return record["selected"]["train_val"]


def weights(content, method, name="head.weight"):
    return load_file(Path("output") / content["recipe"]["name"] / selected(content, method)["weights"])[name]


def accuracies(pick):
    """As α is chosen: on `train_val` the mean over the domains."""
    pooled = {split: score["accuracy"] for split, score in pick["metrics"].items()}
    return pooled | {"train_val": pick["value"]}


def check_curve(content, seed):
    wise, half = selected(content, "wise_ft", seed), selected(content, "half", seed)
    assert [point["alpha"] for point in wise["curve"]] == [i / 10 for i in range(11)]
    assert wise["curve"] == half["curve"] and half["alpha"] == 0.5
    best = max(wise["curve"], key=lambda point: point["train_val"])
    assert wise["alpha"] == best["alpha"] and wise["value"] == best["train_val"]
    domains = wise["metrics"]["train_val"]["per_domain"].values()
    assert wise["value"] == pytest.approx(sum(domain["accuracy"] for domain in domains) / len(domains))
    for pick in (wise, half):
        [point] = [point for point in pick["curve"] if point["alpha"] == pick["alpha"]]
        assert point == {"alpha": pick["alpha"]} | accuracies(pick)
    assert wise["curve"][0] == {"alpha": 0.0} | accuracies(selected(content, "zero_shot"))
    assert len({point["train_val"] for point in wise["curve"]}) > 2  # a curve, no point
    return wise


def test_on_cached_features():
    content = results()
    for seed in (0, 1):
        wise, erm = check_curve(content, seed), selected(content, "erm", seed)
        assert wise["curve"][10] == {"alpha": 1.0} | accuracies(erm)
    for name in ("head.weight", "head.bias"):
        zero, half, one = (weights(content, method, name) for method in ("zero_shot", "half", "erm"))
        torch.testing.assert_close(half, (zero + one) / 2)

    # a method with `normalize` is as with a normalising encoder
    rows = [row.replace("}", ", normalize: true}") for row in (START, HALF)]
    by_method = results("name=method", "encoder.normalize=false", methods=[
        "{name: zero_shot, normalize: true}", *rows, "{name: erm, label: as it comes}"])  # fmt: skip
    for method in ("zero_shot", "erm", "half"):
        picks = [accuracies(selected(one, method)) for one in (content, by_method)]
        assert picks[0] == pytest.approx(picks[1], abs=0.03), method
    for method, normalized in (("erm", "true"), ("half", "true"), ("zero_shot", "true"), ("as it comes", "false")):
        with safe_open(f"output/method/{selected(by_method, method)['weights']}", framework="pt") as file:
            assert file.metadata()["normalize"] == normalized
    assert accuracies(selected(by_method, "erm")) != accuracies(selected(by_method, "as it comes"))


def test_a_cosine_head_starts_where_zero_shot_is():
    """Without a normalising encoder; rows with that head are compared with ERM on it."""
    rows = [ZERO, "{name: erm, head: cosine}", "{name: wise_ft, head: cosine}", HALF.replace("}", ", head: cosine}")]
    content = results("encoder.normalize=false", "training.lr=0.05", methods=rows)
    for seed in (0, 1):
        check_curve(content, seed)
    assert weights(content, "half").isfinite().all() and weights(content, "half", "head.log_scale").isfinite()
    compared = {row["first"] for row in content["comparisons"]}
    assert "wise_ft" in compared and not compared & {"erm", "zero_shot"}
    (record, _) = [record for record in content["runs"] if record["method"] == "wise_ft"]
    assert record["hparams"]["head"] == "cosine" and record["hparams"]["cosine.scale"] == 1 / 0.07


def test_the_model_of_a_final_fit_has_the_median_alpha():
    content = results("protocol.seeds=3", "protocol.final_fit=true", methods=["wise_ft"])
    final, picks = content["final_fit"], [selected(content, "wise_ft", seed) for seed in range(3)]
    for name in ("alpha", "step"):
        assert final[name] == sorted(pick[name] for pick in picks)[1]
    assert f"alpha = {final['alpha']}, the median" in final["how"]
    assert load_file(RUN / final["weights"])["head.weight"].isfinite().all()


def test_each_method_has_its_own_prompts():
    """The rows of one recipe: the head is that of its own prompts, not of the encoder's or of another row."""
    drawn = "prompts: ['{}, drawn']"
    rows = [ZERO, f"{{name: zero_shot, {drawn}, label: drawn}}", START.replace("}", f", {drawn}}}"), "wise_ft"]
    content = results("training.lr=1.0e-12", methods=rows)
    heads = {method: weights(content, method) for method in ("zero_shot", "drawn", "erm", "wise_ft")}
    torch.testing.assert_close(heads["erm"], heads["drawn"])  # it has not left where it started
    torch.testing.assert_close(heads["wise_ft"], heads["zero_shot"])
    assert (heads["drawn"] - heads["zero_shot"]).abs().max() > 0.01
    hparams = {record["method"]: record["hparams"] for record in content["runs"]}
    assert hparams["drawn"]["prompts"] == ["{}, drawn"] and "prompts" not in hparams["zero_shot"]


def test_end_to_end_the_encoder_too():
    short = "training={batch_size: 4, steps: 4, evaluate_every: 4, lr: 0.01, encoder_lr: 1.0e-3}"
    overrides = "encoder.trainable=true", "protocol.seeds=1", short
    content = results(*overrides, methods=[START, HALF])
    assert selected(content, "half")["curve"][10] == {"alpha": 1.0} | accuracies(selected(content, "erm"))
    start, name = load_file("wise_clip.safetensors")["visual.proj"], "visual.proj"
    end = load_file(RUN / selected(content, "erm")["weights"])
    [key] = [key for key in end if key.startswith("encoder.") and key.endswith(name)]
    torch.testing.assert_close(weights(content, "half", key), (start + end[key]) / 2)
    assert not torch.equal(end[key], start)
