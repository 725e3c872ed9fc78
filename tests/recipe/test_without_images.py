"""A recipe with `data: {name: features}`: it has no encoder, and what needs images is refused with one line."""

import pytest
import yaml

from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError

RECIPE = """\
name: small
data: {name: features, file: f.npz}
protocol: {name: leave_one_domain_out}
methods: [erm, xdomainmix, linear_probe]
training: {steps: 10}
"""


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.yaml").write_text(RECIPE)
    return lambda *overrides: load(str(tmp_path / "small.yaml"), list(overrides))


def test_it_is_read_back_as_it_is_written(small, tmp_path):
    made = small()
    assert not made.has_images and not made.trains_encoders and "encoder" not in made.resolved()
    assert made.features.precision == "fp32" and made.data_common.train_augmentation == ()
    (tmp_path / "again.yaml").write_text(made.as_yaml())
    assert load(str(tmp_path / "again.yaml"), []).resolved() == made.resolved()
    assert [item.record_fields["encoder"] for item in made.methods] == ["features"] * 3


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("encoder={name: timm, model: resnet50}", "encoder"),
        ("data.train_augmentation=domainbed", "data.train_augmentation"),
        ("features.views=2", "features.views"),
        ("report.images=true", "report.images"),
        ("cluster.name=ray", "cluster.name"),
        ("methods=[erm, zero_shot]", "methods.1"),
        ("methods=[{name: erm, head_init: zero_shot}]", "methods.0"),
        ("methods=[{name: erm, trainable: true}]", "methods.0.trainable"),
        ("methods=[mixstyle]", "methods.0"),
    ],
)
def test_what_needs_images_is_refused(override, key, small):
    with pytest.raises(UserError) as caught:
        small(override)
    [line] = str(caught.value).splitlines()
    assert f" {key}: " in line and "data has no images" in line and line.endswith("leave it out")


def test_other_data_still_need_an_encoder(small, tmp_path):
    values = yaml.safe_load(RECIPE) | {"data": {"name": "digits"}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match="encoder: needs a name"):
        load(str(tmp_path / "other.yaml"), [])
