"""`foreword export`: a drafter folder becomes a model folder, with two lines of summary."""

import json


def test_a_drafter_becomes_a_model(run, tiny_model, keep_drafter, tmp_path):
    drafter, out = keep_drafter("draft_model", tiny_model, tmp_path / "drafter"), tmp_path / "small"
    shown = run("export", drafter, "--model", tiny_model, "--out", out, "--dtype", "float32")
    assert shown.exit_code == 0 and (out / "model.safetensors").is_file()
    assert f"{out}: 2 layers, " in shown.stdout and " MB in float32" in shown.stdout
    assert f"--drafter {out}" in shown.stdout
    written = run("generate", "the words", "--model", tiny_model, "--drafter", out, "--max-new-tokens", 6, "--json")
    assert json.loads(written.stdout)["method"] == "draft_model"
    again = run("export", drafter, "--model", tiny_model, "--out", out)
    assert again.exit_code == 2 and "name a new or an empty folder" in again.stderr


def test_json(run, tiny_model, keep_drafter, tmp_path):
    drafter, out = keep_drafter("draft_model", tiny_model, tmp_path / "drafter"), tmp_path / "small"
    done = json.loads(run("export", drafter, "--model", tiny_model, "--out", out, "--json").stdout)
    assert (done["out"], done["layers"], done["dtype"]) == (str(out), 2, "bfloat16") and done["bytes"] > 0
