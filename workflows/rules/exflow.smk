# arXiv 2401.08383: ExFlow.


use rule zero_train as exflow_affinity with:
    input:
        unfinished("exflow_affinity"),
    output:
        update("results/{run}/records/exflow_affinity/{job}.json"),
    log:
        "results/{run}/logs/exflow_affinity/{job}.log",
    threads: 1
    params:
        arguments=arguments,


use rule zero_train as exflow_placement with:
    input:
        unfinished("exflow_placement"),
    output:
        update("results/{run}/records/exflow_placement/{job}.json"),
    log:
        "results/{run}/logs/exflow_placement/{job}.log",
    threads: 1
    params:
        arguments=arguments,


use rule zero_train as exflow_serving with:
    input:
        unfinished("exflow_serving"),
    output:
        update("results/{run}/records/exflow_serving/{job}.json"),
    log:
        "results/{run}/logs/exflow_serving/{job}.log",
    threads: 1
    params:
        arguments=arguments,


use rule zero_train as moe_train with:
    input:
        unfinished("moe_train"),
    output:
        update("results/{run}/records/moe_train/{job}.json"),
    log:
        "results/{run}/logs/moe_train/{job}.log",
    threads: 1
    params:
        arguments=arguments,


use rule zero_train as moe_decode with:
    input:
        unfinished("moe_decode"),
    output:
        update("results/{run}/records/moe_decode/{job}.json"),
    log:
        "results/{run}/logs/moe_decode/{job}.log",
    params:
        arguments=arguments,


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
