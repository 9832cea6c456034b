from mxfp8_titan.bench.render import main
from tests.test_docs import ROOT


def test_the_page_of_benchmarks_is_what_the_results_files_render_to(tmp_path):
    main(ROOT / "docs" / "benchmarks", tmp_path / "benchmarks.md")
    assert (tmp_path / "benchmarks.md").read_text() == (ROOT / "docs" / "benchmarks.md").read_text()
