# arXiv 2305.13484: Flover.


use rule zero_notebook as flover_notebook with:
    input:
        notebook="notebooks/flover.ipynb",
        claims="config/claims.yaml",
        records=records("flover_serving", "flover_parallel", "flover_queue"),
    output:
        html=report(
            "results/{run}/notebooks/flover.html",
            category="Notebooks",
            caption="../report/notebook.rst",
        ),
        figures=report(pictures("flover"), category="Flover", caption="../report/figure.rst"),
    log:
        notebook="results/{run}/notebooks/flover.ipynb",
        text="results/{run}/logs/notebook-flover.log",
    params:
        records=record_folder,
        name="flover",
        reader=PLAN["reader"],


rule flover:
    input:
        expand(rules.flover_notebook.output, run=RUN),


localrules:
    flover,
