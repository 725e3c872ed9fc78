"""What a notebook shows of a model."""

import xdm_ft


def test_a_model_shows_what_it_is_with_names_escaped(model):
    loaded = xdm_ft.load(model)
    html = loaded._repr_html_()
    assert f"<td>{loaded.config.method['label']}</td>" in html
    assert f"<td>{loaded.config.encoder.settings['model']}</td>" in html
    expected = loaded.config.expected
    if expected is not None:
        assert f"{100 * expected.mean:.1f}% on held-out domains" in html and "at a new site (95%)" in html
    loaded.class_names = ("<script>", "b")
    assert "<script>" not in loaded._repr_html_() and "&lt;script&gt;, b" in loaded._repr_html_()
