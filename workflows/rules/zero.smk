# arXiv 2501.04266: hierarchical ZeRO++.


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
    resources:
        **submission(),
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
