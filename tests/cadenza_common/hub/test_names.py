"""Names of models on the hub, and the files that they mean."""

from __future__ import annotations

import pytest

from cadenza_common.hub.names import HubError, HubName, choose, label, parse

REPO = "me/tiny"
FOLDER = ["config.json", "model.safetensors", "original/model.safetensors", "consolidated.safetensors", "README.md"]
SPLIT = ["Q8_0/tiny-Q8_0-00001-of-00002.gguf", "Q8_0/tiny-Q8_0-00002-of-00002.gguf"]
GGUFS = ["tiny-Q4_K_M.gguf", "tiny-IQ4_XS.gguf", "tiny.F16.gguf", "mmproj-F16.gguf", "imatrix.gguf", *SPLIT]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2", HubName("gpt2")),
        ("me/tiny", HubName(REPO)),
        ("me/tiny:Q4_K_M", HubName(REPO, tag="Q4_K_M")),
        ("hf.co/me/tiny:q8_0", HubName(REPO, tag="q8_0")),
        ("https://huggingface.co/me/tiny", HubName(REPO)),
        ("https://huggingface.co/me/tiny/blob/main/a/b.gguf", HubName(REPO, "a/b.gguf")),
        ("https://huggingface.co/me/tiny/resolve/main/b.gguf?download=true", HubName(REPO, "b.gguf")),
        ("https://huggingface.co/me/tiny/tree/main", HubName(REPO)),
        ("https://huggingface.co/me/tiny?library=transformers", HubName(REPO)),
        ("me/tiny/b.gguf", HubName(REPO, "b.gguf")),
        *(
            (path, None)
            for path in ("/a", "./a", "../a", "~/a", "a/b/c", "b.gguf", "a/b.gguf", "", ".", "a:", "a b", "a?b")
        ),
    ],
)
def test_what_a_name_says(name: str, said: HubName | None) -> None:
    assert parse(name) == said


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("a-q4_k_m.gguf", "Q4_K_M"),
        ("UD-Q2_K_XL/a-UD-Q2_K_XL-00001-of-00003.gguf", "Q2_K_XL"),
        ("BF16/a-00001-of-00002.gguf", "BF16"),
        ("Qwen2.5-Q8.gguf", "Q8"),
        ("tiny.gguf", ""),
    ],
)
def test_the_quantization_of_a_file(file: str, quantization: str) -> None:
    assert label(file) == quantization


@pytest.mark.parametrize(
    ("name", "files", "gguf", "chosen"),
    [
        (REPO, FOLDER, "", ["config.json", "model.safetensors"]),
        (REPO, [*FOLDER, *GGUFS], "", ["config.json", "model.safetensors"]),
        (f"{REPO}:F16", [*FOLDER, *GGUFS], "tiny.F16.gguf", ["tiny.F16.gguf"]),
        (REPO, ["config.json", *GGUFS], GGUFS[0], [GGUFS[0]]),
        (f"{REPO}:q8_0", GGUFS, SPLIT[0], SPLIT),
        (f"{REPO}/{SPLIT[1]}", GGUFS, SPLIT[0], SPLIT),
        (f"{REPO}:UD-Q4_K_XL", ["t-Q4_K_XL.gguf", "t-UD-Q4_K_XL.gguf"], "t-UD-Q4_K_XL.gguf", ["t-UD-Q4_K_XL.gguf"]),
        (f"{REPO}:Q4_K_XL", ["t-UD-Q4_K_XL.gguf"], "t-UD-Q4_K_XL.gguf", ["t-UD-Q4_K_XL.gguf"]),
        (REPO, ["one-Q2_K.gguf"], "one-Q2_K.gguf", ["one-Q2_K.gguf"]),
    ],
)
def test_the_files_that_a_name_means(name: str, files: list[str], gguf: str, chosen: list[str]) -> None:
    said = parse(name)
    assert said is not None
    found = choose(said, files)
    assert (found.gguf, list(found.files), found.note) == (gguf, chosen, "")


def test_the_nearest_quantization_is_said() -> None:
    found = choose(HubName(REPO), ["t-Q2_K.gguf", "t-Q5_K_M.gguf", "t-Q8_0.gguf"])
    assert found.gguf == "t-Q5_K_M.gguf"
    assert found.note == "me/tiny has no Q4_K_M: the nearest is Q5_K_M of Q2_K, Q5_K_M, Q8_0"


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        (f"{REPO}:Q6_K", GGUFS, r"has no quantization Q6_K; there are IQ4_XS, Q4_K_M, Q8_0, F16$"),
        (f"{REPO}:Q6_K", FOLDER, r"has no GGUF files, of which :Q6_K would name one$"),
        (f"{REPO}/tiny-Q4_K.gguf", GGUFS, r"has no file tiny-Q4_K\.gguf; did you mean tiny-Q4_K_M\.gguf\?$"),
        (f"{REPO}:Q8_0", [*GGUFS[:3], SPLIT[0]], r"has no quantization Q8_0; there are IQ4_XS, Q4_K_M, F16$"),
    ],
)
def test_names_of_what_is_not_there(name: str, files: list[str], message: str) -> None:
    said = parse(name)
    assert said is not None
    with pytest.raises(HubError, match=message):
        choose(said, files)
