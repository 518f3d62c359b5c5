"""Whether kernels in CUDA C++ race, or leave their memory: sanitizers watch their threads on a CPU.

To ThreadSanitizer they run at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kernels.cuda_on_host.module import COMPILER, SANITIZER

ROOT = Path(__file__).parents[3]
GPU_TESTS = "tests/kernels/gpu"
RACE = "WARNING: ThreadSanitizer: data race"
OVERFLOW = "ERROR: AddressSanitizer: "
# What other libraries do is theirs.
OPTIONS = {"thread": "ignore_noninstrumented_modules=1 exitcode=0", "address": "detect_leaks=0"}
ARGUMENTS = "struct Arguments { int* numbers; int* met; };"
# For two blocks of two warps.
KERNEL = """
KERNEL(64, 1) %s(const Arguments all) {
    DYNAMIC_SHARED(memory);
    int* const own = reinterpret_cast<int*>(memory);
    const int thread = thread_number(), block = block_number();
    %s
}
"""
SCRIPT = """
import ctypes, sys, torch
from pathlib import Path
from tests.kernels.cuda_on_host.module import loaded_on_host
from winnow_kernels.cuda.module import source_of

class Arguments(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_void_p), ("met", ctypes.c_void_p))

path, *names = sys.argv[1:]
kernels = tuple((name, 64, 1024) for name in names)
loaded = loaded_on_host(source_of(Path(path), macros={}), kernels, torch.device("cpu"))
for name in names:
    print("example", name, file=sys.stderr, flush=True)
    numbers, met = torch.zeros(64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for _ in range(2):
        loaded[name].launch((2, 1), Arguments(numbers.data_ptr(), met.data_ptr()))
"""
# Lanes read what their neighbours copy over.
COPY = """
    add_atomically(all.numbers, own[4 * (thread ^ 1)]);
    %s
    copy_run<64>(own + 4 * thread, all.met);
    end_of_copies();
    wait_for_copies<0>();
"""
RACING = {
    "blocks_write_the_same": "all.numbers[thread] = 1;",
    "a_warp_reads_what_another_writes": "own[thread] = 1; sync_warp(); add_atomically(all.numbers, own[63 - thread]);",
    # Lanes that exchange numbers wait for each other, but not for what each has written.
    "lanes_only_exchange": "own[thread] = from_xor(1, 1); add_atomically(all.numbers, own[thread ^ 1]);",
    # A copy may be there as soon as it has begun.
    "a_copy_is_over_what_is_read": COPY % "",
    "blocks_do_not_meet": """
        if (thread == 0) all.numbers[block] = 1;
        sync_block();
        if (thread == 0) all.numbers[2 + block] = all.numbers[1 - block];""",
}
SOUND = {
    "blocks_add_atomically": "add_atomically(all.numbers + thread, 1);",
    "a_block_meets": "own[thread] = 1; sync_block(); add_atomically(all.numbers, own[63 - thread]);",
    "a_warp_meets": "own[thread] = 1; sync_warp(); add_atomically(all.numbers, own[thread ^ 1]);",
    "a_copy_is_waited_for": COPY % "sync_warp();" + "sync_warp(); add_atomically(all.numbers, own[4 * (thread ^ 1)]);",
    "blocks_meet": """
        if (thread == 0) {
            all.numbers[block] = 1;
            if (meet_at(all.met, 1) % 2 == 1) all.numbers[2] = all.numbers[0] + all.numbers[1];
        }""",
}

BEYOND = {
    "what_is_loaded": "add_atomically(all.numbers, all.numbers[1 + thread]);",
    "what_is_stored": "all.numbers[thread - 1] = 0;",
    "what_is_shared": "add_atomically(all.numbers, own[256]);",
}


def watched(sanitizer: str, *arguments: str, options: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with arguments under a sanitizer with further options, which reports on standard error."""
    assert COMPILER is not None
    libraries = []
    for name in (f"lib{sanitizer[0]}san.so", "libstdc++.so"):
        named = [COMPILER, f"-print-file-name={name}"]
        libraries.append(subprocess.run(named, check=True, capture_output=True, text=True).stdout.strip())
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        SANITIZER: sanitizer,
        "LD_PRELOAD": " ".join(libraries),
        f"{sanitizer[0].upper()}SAN_OPTIONS": f"{OPTIONS[sanitizer]} {options}",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }
    # Where addresses are drawn from a wide range, ThreadSanitizer does not start.
    fixed = ("setarch", "--addr-no-randomize")
    is_allowed = shutil.which(fixed[0]) and subprocess.run([*fixed, "true"], check=False).returncode == 0
    begin = fixed if is_allowed else ()
    return subprocess.run(
        [*begin, sys.executable, *arguments], cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )


def launched(sanitizer: str, examples: Mapping[str, str], folder: Path, options: str = "") -> str:
    """Return what a sanitizer reports of examples, one after the other."""
    file = folder / "examples.cu"
    file.write_text("\n".join([ARGUMENTS, *(KERNEL % example for example in examples.items())]))
    return watched(sanitizer, "-c", SCRIPT, str(file), *examples, options=options).stderr


def test_what_lacks_a_barrier_is_found(tmp_path: Path) -> None:
    # They race at the same addresses.
    options = "suppress_equal_addresses=0 suppress_equal_stacks=0"
    reports = launched("thread", RACING | SOUND, tmp_path, options).split("example ")
    assert {report.split("\n", 1)[0] for report in reports if RACE in report} == set(RACING)
    assert len(reports) == 1 + len(RACING | SOUND)


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_memory_is_found(name: str, tmp_path: Path) -> None:
    report = launched("address", SOUND | {name: BEYOND[name]}, tmp_path)
    before, after = report.split(f"example {name}\n")
    assert OVERFLOW not in before
    assert OVERFLOW in after


@pytest.mark.parametrize("sanitizer", OPTIONS)
@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("test_attend_cuda.py", "test_equals_the_reference and not any and dtype1-2-4-64"),
        ("test_lowbit.py", "warp_takes or (lowest and cuda)"),
        pytest.param("test_attend_cuda.py", "not compiles", marks=pytest.mark.full),
        pytest.param("test_lowbit.py", "cuda or True or neighbours or last_step", marks=pytest.mark.full),
        pytest.param("test_lowbit_sharing.py", "sharing", marks=pytest.mark.full),
    ],
)
def test_kernels_are_sound(file: str, names: str, sanitizer: str) -> None:
    # What pytest captures of a test that passes it does not tell.
    arguments = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", f"{GPU_TESTS}/{file}", "-k", names)
    done = watched(sanitizer, *arguments)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert " passed" in told
    assert RACE not in told
    assert OVERFLOW not in told
