"""The repository's forms, workflow and citation follow their schemas, and one version is said everywhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise as tw

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
SCHEMAS = {
    GITHUB / "workflows" / "ci.yml": "github-workflows",
    GITHUB / "ISSUE_TEMPLATE" / "config.yml": "github-issue-config",
    ROOT / "CITATION.cff": "citation-file-format",
    **dict.fromkeys(FORMS, "github-issue-forms"),
}
PYTHON = re.compile(r"PYTHON=python(\d+\.\d+)")


def check(file, schema):
    """Run the check with the schemas that it brings, so that it needs no network."""
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(file))
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda path: path.name)
def test_a_file_follows_its_schema(file):
    pytest.importorskip("check_jsonschema")
    done = check(file, SCHEMAS[file])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_workflow_with_a_fault_is_refused(tmp_path):
    pytest.importorskip("check_jsonschema")
    text = (GITHUB / "workflows" / "ci.yml").read_text()
    (tmp_path / "ci.yml").write_text(text.replace("runs-on:", "runs-at:"))
    assert check(tmp_path / "ci.yml", "github-workflows").returncode == 1


def test_the_workflow_runs_what_has_to_pass():
    text = (GITHUB / "workflows" / "ci.yml").read_text()
    assert re.findall(r"- run: (.*)", text) == [".ci/run"]
    assert f'python-version: "{PYTHON.search((ROOT / ".ci" / "run").read_text())[1]}"' in text


def test_there_are_forms_and_a_template_for_changes():
    assert len(FORMS) >= 3
    assert "CONTRIBUTING.md" in (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text()


def test_one_version_is_said_everywhere():
    assert f"\nversion: {tw.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    versions = re.findall(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == tw.__version__
    assert versions == sorted(versions, key=lambda text: tuple(map(int, text.split("."))), reverse=True)
    assert 'path = "src/tilewise/__init__.py"' in (ROOT / "pyproject.toml").read_text(), "the package's own version"
    for page in ("README.md", "README.zh-CN.md"):
        assert set(re.findall(r"\btilewise[ =]+v?(\d+\.\d+\.\d+)", (ROOT / page).read_text())) <= {tw.__version__}


def test_the_changelog_is_what_a_user_needs_to_upgrade():
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= 1800, "history is in git"
