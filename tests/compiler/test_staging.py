from pathlib import Path

from bundle_samples import write_sample

from dsc.compiler.staging import held, staged


def test_a_bundle_that_is_being_measured_survives_another_compile_of_the_same_output(tmp_path: Path):
    output = tmp_path / "model.dsmodel"
    with staged(output) as first:
        write_sample(first)
        with held(first), staged(output) as second:
            assert first.exists()
            assert first != second
        with staged(output):
            assert not first.exists(), "nobody holds it: its writer is taken for dead"
    assert list(tmp_path.iterdir()) == []
