"""Files are there whole or not at all."""

import pytest
from full_disk import full_disk
from matplotlib.figure import Figure

from dlrm import files
from dlrm.errors import UsageError

WRITES = {
    "a.txt": lambda path: files.write(path, bytes(1000)),
    "a.json": lambda path: files.write_json(path, list(range(100))),
    "a.svg": lambda path: files.write_figure(path, Figure()),
}


@pytest.mark.parametrize("name", WRITES)
def test_on_a_full_disk_the_old_file_stays(tmp_path, name):
    path = tmp_path / name
    for old in (None, b"old"):
        with full_disk(), pytest.raises(UsageError) as refused:
            WRITES[name](path)
        assert str(refused.value) == f"{path} cannot be written: File too large"
        assert [(p, p.read_bytes()) for p in tmp_path.iterdir()] == [(path, old)] * bool(old)
        path.write_bytes(b"old")
    WRITES[name](path)
    assert list(tmp_path.iterdir()) == [path] and len(path.read_bytes()) > 50
