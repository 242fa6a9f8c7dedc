# Verdicts, the report, and short names for figures.


use rule zero_notebook as claims_notebook with:
    input:
        notebook="notebooks/claims.ipynb",
        claims="config/claims.yaml",
        records=records(),
    output:
        html=report(
            "results/{run}/notebooks/claims.html",
            category="Notebooks",
            caption="../report/notebook.rst",
        ),
        figures=report(pictures("claims"), category="Verdicts", caption="../report/figure.rst"),
    log:
        notebook="results/{run}/notebooks/claims.ipynb",
        text="results/{run}/logs/notebook-claims.log",
    params:
        records=record_folder,
        name="claims",
        reader=PLAN["reader"],


rule verdicts:
    input:
        claims="config/claims.yaml",
        records=records(),
    output:
        "results/{run}/claims.json",
    log:
        "results/{run}/logs/claims.log",
    conda:
        "../../environment.yml"
    resources:
        **submission(),
    params:
        records=record_folder,
        reader=PLAN["reader"],
    shell:
        "repro claims --results {params.records:q} --out {output:q} > {log:q} 2>&1"


rule html_report:
    input:
        rules.claims_notebook.output,
        rules.zero_notebook.output,
        rules.exflow_notebook.output,
        rules.flover_notebook.output,
        rules.scaling_notebook.output,
        claims=rules.verdicts.output,
    output:
        "results/{run}/report.html",
    log:
        "results/{run}/logs/report.log",
    conda:
        "../../environment.yml"
    resources:
        **submission(),
    params:
        records=record_folder,
        reader=PLAN["reader"],
    shell:
        "repro report --results {params.records:q} --figures results/{wildcards.run}/figures --out {output:q} > {log:q} 2>&1"


# What only reads records runs where Snakemake does, unless the platform says that it is to be a job as well.
if READ_HERE:

    localrules:
        claims_notebook,
        zero_notebook,
        exflow_notebook,
        flover_notebook,
        scaling_notebook,
        verdicts,
        html_report,


rule replot:
    input:
        "results/replot/report.html",


localrules:
    replot,


for figure in PLAN["figures"]:

    rule:
        name:
            figure
        input:
            f"{PLAN['results']}/figures/{figure}.png",
        localrule: True
