# arXiv 2501.04266: hierarchical ZeRO++.


rule zero_train:
    input:
        unfinished("zero_train"),
    output:
        update("results/{run}/records/zero_train/{job}.json"),  # an old record stays until a new one replaces it
    log:
        "results/{run}/logs/zero_train/{job}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores  # a timed point has the machine for itself
    params:
        arguments=arguments,
    shell:
        "repro run {params.arguments:q} --record-failure --out {output:q} > {log:q} 2>&1"


use rule zero_train as zero_plan with:
    input:
        unfinished("zero_plan"),
    output:
        update("results/{run}/records/zero_plan/{job}.json"),
    log:
        "results/{run}/logs/zero_plan/{job}.log",
    threads: 1
    params:
        arguments=arguments,


rule zero_notebook:
    input:
        notebook="notebooks/zero.ipynb",
        claims="config/claims.yaml",
        records=records("zero_train", "zero_plan"),
    output:
        html=report(
            "results/{run}/notebooks/zero.html",
            category="Notebooks",
            caption="../report/notebook.rst",
        ),
        figures=report(
            pictures("zero"),
            category="Hierarchical ZeRO++",
            caption="../report/figure.rst",
        ),
    log:
        notebook="results/{run}/notebooks/zero.ipynb",
        text="results/{run}/logs/notebook-zero.log",
    conda:
        "../../environment.yml"
    params:
        records=record_folder,
        name="zero",
        reader=PLAN["reader"],
    shell:
        "repro notebook {params.name} --out results/{wildcards.run}/notebooks"
        " -p records={params.records:q} -p output=results/{wildcards.run}/figures > {log.text:q} 2>&1"


rule zero:
    input:
        expand(rules.zero_notebook.output, run=RUN),


localrules:
    zero,
