"""Which ERM each row is compared with: under its encoder, with its head, at its cut."""

from __future__ import annotations

from xdm_ft.evaluation.summary import LINEAR, Compared, erm_of_each

COSINE = ("cosine", ("scale", 10.0))


def row(label: str, cut: object = False, encoder: str | None = None, head: tuple[object, ...] = LINEAR) -> Compared:
    return Compared(label, label.startswith("erm"), encoder, head, cut)  # type: ignore[arg-type]


def test_by_hand_for_one_encoder() -> None:
    heads = [row("erm"), row("erm cosine", head=COSINE), row("mix"), row("mix cosine", head=COSINE)]
    assert erm_of_each(heads) == {"erm cosine": "erm", "mix": "erm", "mix cosine": "erm cosine"}
    assert erm_of_each([row("mix"), row("sam")]) == {}
    assert erm_of_each([row("mix cosine", head=COSINE), row("erm")]) == {}, "no ERM has this head"
    assert erm_of_each([row("mix"), row("erm 2"), row("erm 1")]) == {"mix": "erm 2", "erm 1": "erm 2"}, "the first"


def test_a_method_has_the_erm_at_its_cut_and_erm_the_first_one() -> None:
    rows = [row("zero_shot"), row("erm"), row("erm 2", 2), row("mix", False), row("mix 2", 2), row("mix 4", 4)]
    assert erm_of_each(rows) == {"zero_shot": "erm", "erm 2": "erm", "mix": "erm", "mix 2": "erm 2", "mix 4": "erm"}


def test_without_an_erm_at_its_cut_a_method_has_the_one_of_its_augmentation() -> None:
    crops = [one._replace(augmentation="crops") for one in (row("erm all", True), row("mix 4", 4))]
    rows = [crops[0], row("erm"), row("erm 2", 2), crops[1], row("mix 3", 3), row("probe")]
    assert erm_of_each(rows) == {
        "erm all": "erm", "erm 2": "erm", "mix 4": "erm all", "mix 3": "erm", "probe": "erm",
    }  # fmt: skip
    viewed = row("erm")._replace(augmentation="crops")
    assert erm_of_each([row("erm 2", 2), viewed, row("probe")]) == {"erm 2": "erm", "probe": "erm"}, "the cut is first"


def test_erm_is_compared_with_the_one_on_the_frozen_encoder_wherever_it_stands() -> None:
    rows = [row("erm all", True), row("erm 2", 2), row("erm"), row("mix 4", 4)]
    assert erm_of_each(rows) == {"erm all": "erm", "erm 2": "erm", "mix 4": "erm all"}
    assert erm_of_each(rows[:2]) == {"erm 2": "erm all"}, "without one, the first"


def test_no_reference_is_of_another_encoder() -> None:
    rows = [row(f"{name} @ {own}", encoder=own) for own in ("small", "large") for name in ("erm", "mix")]
    assert erm_of_each(rows) == {"mix @ small": "erm @ small", "mix @ large": "erm @ large"}
    assert erm_of_each([row("erm @ a", encoder="a"), row("mix @ b", encoder="b"), row("mix @ a", encoder="a")]) == {
        "mix @ a": "erm @ a"
    }
