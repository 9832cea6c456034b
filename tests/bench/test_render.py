from mxfp8_titan.bench.render import main, report_section, section
from mxfp8_titan.bench.results import Row, as_dicts
from tests.test_docs import ROOT


def test_the_page_of_benchmarks_is_what_the_results_files_render_to(tmp_path):
    main(ROOT / "docs" / "benchmarks", tmp_path / "benchmarks.md")
    assert (tmp_path / "benchmarks.md").read_text() == (ROOT / "docs" / "benchmarks.md").read_text()


def test_times_of_several_versions_are_a_table_of_their_own():
    rows = [
        Row("copy", 4242, "GB/s", "", "1 GiB"),
        Row("quantize_both_beside", 1.5, "x", "", "64x64, RCEIL", {"here": 10.0, "torch.compile": 15.0}),
        Row("swiglu_beside", 0.9, "x", "", "32x64, RCEIL", {"here": 10.0, "torch.compile": None, "torchao": 9.04}),
    ]
    main, others = section("kernels", {"command": "bench", "rows": as_dicts(rows)}).split("### Beside others")
    assert "| copy | 4242 |" in main
    assert "_beside" not in main + others
    assert others.endswith(
        "| op | case | here, us | torch.compile, us | torchao, us | fastest other / here |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| quantize_both | 64x64, RCEIL | 10.0 | 15.0 | - | 1.50 |\n"
        "| swiglu | 32x64, RCEIL | 10.0 | - | 9.0 | 0.90 |\n"
    )


def test_a_report_is_a_section_with_its_parts_below(tmp_path):
    (tmp_path / "report.md").write_text("# Comparison\n\n## Speed\n\n![a](b.png)\n\n## Commands\n\n- x\n")
    lines = report_section(tmp_path, "One").splitlines()
    assert [line for line in lines if line.startswith("#")] == ["## One", "### Speed"]
    assert f"![a]({tmp_path.parent.name}/{tmp_path.name}/b.png)" in lines
