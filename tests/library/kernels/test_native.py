"""The native library: how it is found, loaded and refused, and its instruction-set variants."""

import json
import os
import platform
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.core.versions import cpu_capabilities
from subquad.kernels import native
from subquad.kernels.native import interface, structures

ROOT = Path(__file__).parents[3]  # where `python -m tests.…` finds itself
here = pytest.mark.skipif(native.refusal() is not None, reason=f"backend cpu: {native.refusal()}")


@pytest.mark.skipif(os.environ.get("SUBQUAD_REQUIRE_CPU") != "1", reason="SUBQUAD_REQUIRE_CPU is not 1")
def test_the_library_is_there_where_it_must_be():
    """Elsewhere the tests of compiled kernels skip themselves without it: they must not do so unseen."""
    assert native.refusal() is None
    assert sq.backends()["cpu"] == "available"


@here
def test_it_says_what_it_can_do():
    assert native.variants()[-1] == ("neon" if platform.machine() in ("aarch64", "arm64") else "baseline")
    assert len(set(native.variants())) == len(native.variants())
    assert native.variant() == native.variants()[0], "the fastest is not in use"
    assert native.library().subquad_abi_version() == native.ABI_VERSION


@here
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="a CPU without AVX2, or not an x86-64"
)
def test_torch_and_the_library_agree_on_the_cpu():
    assert "avx2" in native.variants()
    assert ("avx512" in native.variants()) == (torch.backends.cpu.get_cpu_capability() == "AVX512")


@here
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone gives the tiles of AMX on request")
def test_tiles_multiply_bf16_where_the_processor_has_them():
    have = cpu_capabilities()
    if not all(have.get(name) for name in ("amx_tile", "amx_bf16")):
        assert "amxbf16" not in native.variants()
    else:
        assert native.variants()[:2] == ["amxbf16", "avx512bf16"]


# ---------------------------------------------------------------------- variants


@here
def test_each_variant_can_be_forced_for_a_while():
    fastest = native.variant()
    for name in native.variants():
        with native.use_variant(name):
            assert native.variant() == name
        assert native.variant() == fastest


@here
def test_variants_nest():
    fastest, slowest = native.variant(), native.variants()[-1]
    with native.use_variant(slowest):
        with native.use_variant(fastest):
            assert native.variant() == fastest
        assert native.variant() == slowest
    assert native.variant() == fastest


@here
def test_a_variant_ends_with_an_error():
    fastest = native.variant()
    with pytest.raises(KeyError), native.use_variant(native.variants()[-1]):
        raise KeyError
    assert native.variant() == fastest


@here
def test_a_variant_is_forced_for_all_threads():
    seen = []
    slowest = native.variants()[-1]
    with native.use_variant(slowest):
        thread = threading.Thread(target=lambda: seen.append(native.variant()))
        thread.start()
        thread.join()
    assert seen == [slowest]


@here
@pytest.mark.parametrize("name", ["sse9", "", "avx"])
def test_an_unknown_variant_is_refused_with_those_that_run_here(name):
    before = native.variant()
    refused = pytest.raises(ValueError, match=rf"no variant '{name}' runs here; there are .*{native.variants()[-1]}")
    with refused, native.use_variant(name):
        pass
    assert native.variant() == before


@here
def test_the_library_itself_refuses_an_unknown_variant():
    assert native.library().subquad_use_variant(b"sse9") == -1
    slowest = native.variants()[-1]
    assert native.library().subquad_use_variant(slowest.encode()) == 0
    assert native.variant() == slowest
    assert native.library().subquad_use_variant(b"") == 0
    assert native.variant() == native.variants()[0]


# ---------------------------------------------------------------------- refusals


def test_without_the_file_and_with_a_compiler_it_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("CXX", f"{sys.executable} -flag")
    library, refused = native._find()
    assert library is None
    assert refused is not None
    assert refused.cause.startswith("no compiled library in this install")
    assert f"there is a C++ compiler now ({sys.executable})" in refused.cause
    assert "pip install -v --force-reinstall --no-deps ." in refused.remedy


@pytest.mark.parametrize(("cxx", "path"), [("no-such-compiler", None), ("", "empty")])
def test_without_the_file_and_a_compiler_it_says_what_to_install(monkeypatch, tmp_path, cxx, path):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("CXX", cxx)
    if path is not None:
        monkeypatch.setenv("PATH", str(tmp_path / path))
    _, refused = native._find()
    assert refused is not None
    assert refused.cause.endswith("for want of a C++ compiler")
    assert refused.remedy.startswith("install one (Debian, Ubuntu: apt install g++;")


def test_a_damaged_file_is_a_reason(tmp_path):
    damaged = tmp_path / native._FILE
    damaged.write_bytes(b"not a library")
    library, refused = native._load(damaged)
    assert library is None
    assert refused is not None
    assert refused.cause.startswith("the compiled library cannot be loaded (")
    assert str(damaged) in refused.cause


def test_a_library_of_something_else_is_a_reason():
    library, refused = native._load(Path(torch._C.__file__))
    assert library is None
    assert refused is not None
    assert "subquad_variants" in refused.cause


@here
def test_a_library_of_another_version_is_a_reason(monkeypatch):
    path = Path(native.__file__).with_name(native._FILE)
    monkeypatch.setattr(native, "ABI_VERSION", 1_000_000)
    library, refused = native._load(path)
    assert library is None
    assert refused is not None
    assert f"{path} has interface " in refused.cause
    assert "but this Python code calls 1000000" in refused.cause


@pytest.mark.parametrize(("damaged", "cause"), [(False, None), (True, "the compiled library cannot be loaded (")])
def test_the_cause_and_the_remedy_make_the_refusal(monkeypatch, tmp_path, damaged, cause):
    refused = None
    if damaged:
        (tmp_path / native._FILE).write_bytes(b"not a library")
        monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
        _, refused = native._find()
    monkeypatch.setattr(native, "_REFUSAL", refused)
    assert native.cause() is None if cause is None else native.cause().startswith(cause)


def test_a_refused_library_cannot_be_had(monkeypatch):
    monkeypatch.setattr(native, "_LIBRARY", None)
    monkeypatch.setattr(native, "_MESSAGE", "it is Sunday")
    assert native.refusal() == sq.backends()["cpu"] == "it is Sunday"
    with pytest.raises(RuntimeError, match="native library cannot be used: it is Sunday"):
        native.variants()
    with pytest.raises(ValueError, match="backend 'cpu' cannot run here: it is Sunday"), sq.use_backend("cpu"):
        pass


# ---------------------------------------------------------------------- OpenMP


@pytest.mark.slow
@here
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime_serves_torch_and_the_library():
    """Two would fight for the cores. torch brings one under the plain name that the library asks for."""
    code = """
import subquad.kernels.native as native, torch
native.library()
torch.rand(64, 64) @ torch.rand(64, 64)
names = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "/" in line}
print(*sorted(name for name in names if "omp" in name.rpartition("/")[2]), sep="\\n")
print(*sorted(name for name in names if "subquad" in name.rpartition("/")[2]), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    runtime, library = done.stdout.split()
    assert Path(runtime).parent == Path(torch.__file__).parent / "lib"
    assert Path(library).name == native._FILE


@here
@pytest.mark.skipif(sys.platform == "win32", reason="on Windows kernels run on one thread")
def test_the_library_has_threads():
    assert native.has_threads()


# ---------------------------------------------------------------------- memory


@here
def test_no_kernel_leaves_its_memory_or_lets_poison_out_of_its_head():
    """A slice of the fuzz program, in a process of its own, which a write to a wrong place would end."""
    least = 100 * len(native.variants())  # some 70 calls reach every kernel of a variant once
    done = subprocess.run(
        [sys.executable, "-m", "tests.library.kernels.fuzz_native", "--calls", str(least)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["calls"] >= least
    assert set(counts["of"]) == set(native.described()["kernels"]), "a kernel was not called"
    assert all(set(of_kernel) == set(native.variants()) for of_kernel in counts["of"].values())


# ---------------------------------------------------------------------- the C interface


def layout_of(*fields: tuple[str, str, int], size: int) -> structures.Structure:
    return structures.Structure("Some", {"Some": [size, *fields]})


def test_a_structure_is_packed_as_the_library_describes_it():
    """If two fields are swapped in C++, their numbers are swapped in memory."""
    x = torch.zeros(2, 3, 5, 7)
    values = {"N": 5, "threads": 1, "scale": 0.5, "x": x}
    kinds = ("N", "int64"), ("threads", "int32"), ("scale", "float32"), ("x", "rows")
    described = layout_of(*((*kind, at) for kind, at in zip(kinds, (0, 8, 12, 16), strict=True)), size=48)
    held: list[object] = []
    assert described.pack(values, held) == struct.pack("=qif4q", 5, 1, 0.5, x.data_ptr(), 105, 35, 7)
    assert held == []
    swapped = layout_of(("threads", "int32", 0), ("N", "int64", 8), size=24)  # the compiler aligns N, and the end
    assert swapped.pack({"N": 5, "threads": 1}, held) == struct.pack("=i4xq8x", 1, 5)


@pytest.mark.parametrize("values", [{"N": 1}, {"N": 1, "M": 2, "K": 3}, {"N": 1, "K": 2}, {"N": 1, "M": None}])
def test_each_field_must_be_given_by_its_name(values):
    with pytest.raises((TypeError, struct.error), match=r"missing|required"):
        layout_of(("N", "int64", 0), ("M", "int64", 8), size=16).pack(values, [])


def test_what_a_kernel_reads_may_have_any_strides_and_what_it_writes_may_not():
    x, held = torch.zeros(4, 6).mT, []
    layout_of(("x", "float32*", 0), size=8).pack({"x": x}, held)
    assert [copy.is_contiguous() for copy in held] == [True]
    for kind, given in (("float32* out", x), ("rows out", torch.zeros(1, 1, 4, 6).mT), ("int64*", x.mT)):
        with pytest.raises(TypeError, match=r"Some\.x: a (kernel writes|tensor of)"):
            layout_of(("x", kind, 0), size=32).pack({"x": given}, [])


@here
def test_a_kernel_is_not_called_with_fields_that_it_does_not_have():
    with pytest.raises(TypeError, match=r"Clustering: missing \['H', .*unknown \['heads'\]; the compiled library"):
        interface.run("kmeans", B=1, heads=1)


def misfits():
    """Calls of ops by hand whose tensors do not fit together: their addresses must not reach a kernel."""
    ops, x, valid = torch.ops.subquad, torch.zeros(2, 2, 9, 4), torch.ones(2, 8, dtype=torch.bool)
    codes, sizes = torch.zeros(2, 2, 9, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    row, lists = x[..., 0], torch.zeros(2, 2, 3, 5, dtype=torch.int64)
    listed = x, x, x, row, codes, lists, 1.0
    layer = [torch.zeros(2, 4, 3)], [torch.zeros(2, 1, 3)], [1], 2, 1.0
    return {
        "hash, mask": lambda: ops.hash_words("cpu", x, 7, 0, True, valid),
        "k-means, mask": lambda: ops.kmeans_labels("cpu", codes, valid, 3, 2),
        "k-means, codes": lambda: ops.kmeans_labels("cpu", codes.int(), None, 3, 2),
        "k-means, clusters": lambda: ops.kmeans_labels("cpu", codes, None, 0, 2),
        "top, mask": lambda: ops.top_by_score("cpu", x, sizes, 3, valid, False),
        "top, sizes": lambda: ops.top_by_score("cpu", x, sizes[:1], 3, None, False),
        "top by hash, vectors": lambda: ops.top_by_hash("cpu", [x.double()], *layer, sizes, 3, None, False),
        "blocks, labels": lambda: ops.label_blocks("cpu", codes.int(), 3, 4),
        "blocks, size": lambda: ops.label_blocks("cpu", codes, 3, 0),
        "top, scores": lambda: ops.top_by_score("cpu", x.double(), sizes, 3, None, False),
        "listed, keys": lambda: ops.listed_forward("cpu", x, x[:1], *listed[2:]),
        "listed, values": lambda: ops.listed_forward("cpu", x, x, x[:, :, :8], *listed[3:]),
        "listed, bias": lambda: ops.listed_forward("cpu", x, x, x, row.double(), codes, lists, 1.0),
        "listed, labels": lambda: ops.listed_forward("cpu", x, x, x, row, codes[:, :, :8], lists, 1.0),
        "listed, lists": lambda: ops.listed_forward("cpu", x, x, x, row, codes, lists[:, :1], 1.0),
        "listed, gradient": lambda: ops.listed_backward("cpu", x[:, :, :8], row, x, row, *listed),
        "listed, gradient of sums": lambda: ops.listed_backward("cpu", x, row[:, :, :8], x, row, *listed),
        "products, keys": lambda: ops.directed_product("cpu", x, x[:, :, :8], x, False),
        "products, values": lambda: ops.directed_product("cpu", x, x, x[:, :, :8], False),
        "products, dtype": lambda: ops.directed_product("cpu", x, x, x.double(), False),
        "clustered, keys": lambda: ops.clustered_forward(
            "cpu", x, x[:1], x, None, None, None, 3, 2, 7, 2, 1.0, 0, False
        ),
        "clustered, values": lambda: ops.clustered_forward(
            "cpu", x, x, x.double(), None, None, None, 3, 2, 7, 2, 1.0, 0, False
        ),
        "clustered, mask": lambda: ops.clustered_forward("cpu", x, x, x, None, valid, None, 3, 2, 7, 2, 1.0, 0, False),
        "clustered, clusters": lambda: ops.clustered_forward(
            "cpu", x, x, x, None, None, None, 0, 2, 7, 2, 1.0, 0, False
        ),
        "features, width": lambda: ops.features_forward("cpu", x, x, x, x[0, :, :7, :3], None, None, None, 0, 0),
        "features, number": lambda: ops.features_forward("cpu", x, x[..., :3], x, None, None, None, None, 0, 0),
        "clustered, topk": lambda: ops.clustered_forward("cpu", x, x, x, None, None, None, 3, -1, 7, 2, 1.0, 0, False),
    }


@here
@pytest.mark.parametrize("misfit", misfits())
def test_tensors_that_do_not_fit_together_are_refused(misfit):
    with pytest.raises(ValueError, match=r"the other tensors go with|at least"):
        misfits()[misfit]()


@here
@pytest.mark.parametrize("op", ["exact_forward", "steps_forward", "features_forward"])
def test_heads_that_do_not_share_keys_are_refused(op):
    query, key = torch.zeros(2, 3, 9, 4), torch.zeros(2, 2, 9, 4)
    rest = {
        "exact_forward": (None, None, False, 0, 1.0),
        "steps_forward": (None, None, None, False, 0, 1.0, None, None),
        "features_forward": (None, None, None, None, 0, 0),
    }
    with pytest.raises(ValueError, match="the 3 query heads are not a multiple of the 2 key heads"):
        getattr(torch.ops.subquad, op)("cpu", query, key, key, *rest[op])
