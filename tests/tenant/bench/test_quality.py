"""`bench quality` with a tiny encoder: cosines to float32, and the number of rows."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from symbiosis_priv.cli import app
from tenant.bench.measured_models import Bert
from tenant.bench.quality import goals
from tenant.bench.report import number, read


def test_rings_and_weight_bits_beside_bfloat16(tmp_path: Path) -> None:
    folder = Bert(width=64, layers=1, inner=64).save(tmp_path)
    words = Tokenizer(WordLevel({str(word): word for word in range(100)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(40))))
    files = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--json", str(tmp_path / "report.json")]
    shown = CliRunner().invoke(
        app, ["bench", "quality", *files, "--tokens", "30", "--weight-bits", "10", "--hint-bits", "16"]
    )
    assert shown.exception is None, shown.output
    rows = read(tmp_path / "report.json").rows
    assert [(row["arithmetic"], row["ring_bits"]) for row in rows] == [
        *[("bfloat16", None), ("ring", 32), ("ring", 24)],
        ("lwe, hints of 16 bits", 32),
    ]
    assert rows[0]["error_over_bfloat16"] == 1
    assert all(
        0 < number(row["one_minus_mean_cosine"]) <= number(row["one_minus_smallest_cosine"]) < 0.01 for row in rows
    )
    # 4 groups, forward, and forward and backward; the pooler has one row, forward
    assert [row["rows"] for row in rows[1:3]] == [30 * 4 * 3 + 2] * 2
    assert rows[2]["repeated_per_million"] == 0  # narrow layers never wrap
    assert len(list(goals(rows))) == 2
