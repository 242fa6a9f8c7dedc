# arXiv 2401.08383: ExFlow.


use rule zero_notebook as exflow_notebook with:
    input:
        notebook="notebooks/exflow.ipynb",
        claims="config/claims.yaml",
        records=records("exflow_affinity", "exflow_placement", "exflow_serving", "moe_train", "moe_decode"),
    output:
        html=report(
            "results/{run}/notebooks/exflow.html",
            category="Notebooks",
            caption="../report/notebook.rst",
        ),
        figures=report(pictures("exflow"), category="ExFlow", caption="../report/figure.rst"),
    log:
        notebook="results/{run}/notebooks/exflow.ipynb",
        text="results/{run}/logs/notebook-exflow.log",
    params:
        records=record_folder,
        name="exflow",
        reader=PLAN["reader"],


rule exflow:
    input:
        expand(rules.exflow_notebook.output, run=RUN),


localrules:
    exflow,
