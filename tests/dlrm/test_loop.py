"""One run: equal batches in every mode, scores by their definition, unequal ranks caught."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from criteo_lines import line
from dlrm import arguments, loop
from dlrm.data import dataset
from dlrm.errors import UsageError
from dlrm.launch import WorkerError, launch
from dlrm.modes import MODES

SMALL = ["--rows", "1500", "--batch-size", "64", "--hash-size", "50", "--embedding-dim", "4"]
SMALL += ["--bottom", "8", "--top", "32"]


pytestmark = pytest.mark.usefixtures("one_rank")


def _run(mode, seed=0, *arguments_):
    options = arguments.parse([*SMALL, *arguments_])
    seen = []
    result = loop.run(mode, seed, dataset.load(options), options, seen.append)
    return result, seen


def test_modes_of_a_seed_share_weights_and_batches():
    """With weights that stand still, equal losses mean equal batches."""
    still = ("--lr", "1e-12", "--epochs", "2")
    losses = {mode: _run(mode, 0, *still)[0].loss for mode in MODES}
    assert len(losses["dense"]) == 2 * 18
    for mode in MODES:
        np.testing.assert_allclose(losses[mode], losses["dense"], rtol=1e-6)
    first, second = losses["dense"].reshape(2, -1)
    assert not np.isclose(first, second).any()  # another order in the second epoch
    assert not np.isclose(_run("dense", 1, *still)[0].loss, losses["dense"]).any()


def test_training_learns():
    result, seen = _run("dense", 0, "--epochs", "12", "--lr", "0.3")
    np.testing.assert_array_equal(result.loss, seen)
    assert result.loss[-18:].mean() < 0.93 * result.loss[:18].mean()
    assert result.auc > 0.55


def test_a_run_leaves_no_process_group_behind():
    """Each has threads that wake a hundred times a second, and a program may make many runs."""
    before = set(dist.distributed_c10d._world.pg_map)
    _run("dct", 0, "--parallel", "hybrid")
    assert set(dist.distributed_c10d._world.pg_map) == before


def test_a_learning_rate_that_diverges_is_named():
    with pytest.raises(UsageError, match=r"--lr must be so small .* got 1e\+30: (nan|inf) at step"):
        _run("dense", 0, "--lr", "1e30")
    with pytest.raises(UsageError, match=r"--lr and --embedding-lr must .* got 0\.1 and 1e\+30: "):
        _run("dense", 0, "--embedding-lr", "1e30")


def test_density_is_the_mean_over_all_compressed_steps():
    result, _ = _run("dct", 0, "--epochs", "12", "--density", "0.03")
    steps = len(result.loss)
    assert steps == 216
    ends = [end for end, _ in result.density]
    assert ends == [16, 116, 216]
    means = [density for _, density in result.density]
    expected = (14 * means[0] + 100 * means[1] + 100 * means[2]) / 214
    assert result.density_mean == pytest.approx(expected)
    assert 0.01 < result.density_mean <= 0.0375
    assert _run("dense")[0].density_mean == 1.0 and _run("bf16")[0].density_mean == 1.0
    assert _run("powersgd")[0].density_mean is None


def test_score_against_its_definition():
    rng = np.random.default_rng(0)
    labels, p = rng.integers(0, 2, 60), rng.random(60).round(1) * 0.98 + 0.01
    pairs = [(a > b) + 0.5 * (a == b) for a in p[labels == 1] for b in p[labels == 0]]
    loss = -np.mean(np.where(labels == 1, np.log(p), np.log(1 - p)))
    calibration = sum(p) / sum(labels)
    assert loop.score(labels, p) == pytest.approx((np.mean(pairs), loss, calibration))


def test_scores_are_those_of_the_test_rows(monkeypatch):
    taken = []
    monkeypatch.setattr(
        loop, "score", lambda y, p: taken.append((y, p)) or loop.Scores(0.5, 0.5, 1.0)
    )
    monkeypatch.setattr(loop, "TEST_BATCH", 7)
    options = arguments.parse(SMALL)
    data = dataset.load(options)
    loop.run("dense", 0, data, options, lambda loss: None)
    ((labels, probability),) = taken
    np.testing.assert_array_equal(labels, data.test.labels.numpy())
    assert len(probability) == len(labels) and 0 < probability.min() < probability.max() < 1


def _differ_in_a_sign_of_zero():
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        loop._check_equal(layer)
        layer.bias[1] = -0.0 if dist.get_rank() == 1 else 0.0
    loop._check_equal(layer)


def test_ranks_with_other_weights_are_caught():
    with pytest.raises(WorkerError, match=r"equal on all ranks, got different ones on ranks \[1\]"):
        launch(_differ_in_a_sign_of_zero, 2)


@pytest.mark.parametrize(
    "arguments_, text",
    [
        (["--batch-size", "5000"], r"--batch-size must be at most the training rows .* got 5000"),
        (["--rows", "150"], r"a run must take more than 2 steps, got 1"),
        (["--test-fraction", "0.00001"], r"the test rows must have labels 0 and 1, got 0 ones"),
        (["--validation-fraction", "0.00001"], r"the validation rows .* got 0 .*--validation-frac"),
    ],
)
def test_too_few_rows(arguments_, text):
    with pytest.raises(UsageError, match=text):
        dataset.load(arguments.parse([*SMALL, *arguments_]))


def test_a_file_of_malformed_lines(tmp_path):
    (tmp_path / "junk.tsv").write_text("no row\n" * 50)
    options = arguments.parse([*SMALL[2:], "--data", str(tmp_path / "junk.tsv")])
    rule = "must have a row in Criteo's layout, got 50 of 50 lines malformed"
    with pytest.raises(UsageError, match=rule):
        dataset.load(options)


def _load(tmp_path, labels, *arguments_):
    path = tmp_path / "rows.tsv"
    path.write_text("".join(f"{line(label=label)}\n" for label in labels))
    return dataset.load(arguments.parse([*SMALL[2:], "--data", str(path), *arguments_]))


def test_many_malformed_lines_are_an_error(tmp_path):
    """One in a hundred passes, more do not, unless they are asked for."""
    good = ["0", "1"] * 200
    assert (
        "left out: 4 of 404 lines malformed (line 1: label"
        in _load(tmp_path, ["7"] * 4 + good, "--batch-size", "32").warning
    )
    rule = r"must have at most 0.01 of its lines malformed \(--max-malformed\), got 5 of 405 lines"
    with pytest.raises(UsageError, match=rule):
        _load(tmp_path, ["7"] * 5 + good)
    some = _load(tmp_path, ["7"] * 5 + good, "--max-malformed", "0.02", "--batch-size", "32")
    assert some.description["malformed"] == 5


def test_what_was_left_out_is_told_before_what_that_leads_to(tmp_path):
    """Labels of -1 and 1: the lines with -1 are malformed, and no test row has label 0."""
    labels = ["-1", "1"] * 200
    with pytest.raises(UsageError) as caught:
        _load(tmp_path, labels, "--max-malformed", "1", "--batch-size", "32")
    first, second = str(caught.value).splitlines()
    assert first.startswith("left out: 200 of 400 lines malformed (line 1: label must be 0 or 1")
    assert second.startswith("the test rows must have labels 0 and 1")
    with pytest.raises(UsageError, match=r"got 200 of 400 lines malformed \(line 1: label must be"):
        _load(tmp_path, labels)


def test_the_split_is_stable_and_of_the_right_size():
    numbers = np.arange(50_000)
    whole, validation = dataset.split(numbers, 0.2, 0.1)
    assert whole.mean() == pytest.approx(0.2, abs=0.01)
    assert validation.mean() == pytest.approx(0.1, abs=0.01) and not (whole & validation).any()
    of_some = dataset.split(numbers[1::3], 0.2, 0.1)
    np.testing.assert_array_equal(of_some, (whole[1::3], validation[1::3]))
    assert dataset.split(numbers, 0.3, 0)[0][whole].all()
    for fraction in (0, 0.5):  # more validation rows are fewer training rows
        np.testing.assert_array_equal(dataset.split(numbers, 0.2, fraction)[0], whole)
        assert dataset.split(numbers, 0.2, fraction)[1].mean() == pytest.approx(fraction, abs=0.01)


def test_validation_rows_are_neither_trained_on_nor_tested(monkeypatch):
    scored = []
    monkeypatch.setattr(
        loop, "score", lambda y, p: scored.append(y) or loop.Scores(0.5 + len(scored), 0.4, 1)
    )
    plain = dataset.load(arguments.parse(SMALL))
    options = arguments.parse([*SMALL, "--validation-fraction", "0.1"])
    data = dataset.load(options)
    assert torch.equal(data.test.ids, plain.test.ids) and len(plain.validation) == 0
    parts = [{tuple(i.tolist()) for i in part.ids} for part in (data.train, data.validation)]
    whole = [tuple(ids.tolist()) for ids in plain.train.ids]
    assert len(data.train) + len(data.validation) == len(whole)
    assert set(whole) == parts[0] | parts[1] and 100 < len(data.validation) < 200
    assert data.description["validation_rows"] == len(data.validation)
    summary = loop.run("dense", 0, data, options, lambda loss: None).summary()
    np.testing.assert_array_equal(scored[0], data.validation.labels.numpy())
    np.testing.assert_array_equal(scored[1], data.test.labels.numpy())
    assert (summary["validation_auc"], summary["auc"]) == (1.5, 2.5)
