"""The measured cases by name, for tests: `CASES["bf16 causal B4 H16 D128 N4096"]`."""

from tilewise.bench.suites import SUITES, Case

CASES: dict[str, Case] = {str(case): case for suite in SUITES.values() for case in suite.cases}
