# Notebooks with their figures, verdicts, the report, and short names for all of them. The plan knows which notebook
# draws a figure, and which experiments it shows.


for notebook, title in PLAN["notebooks"].items():

    rule:
        name:
            f"{notebook}_notebook"
        input:
            notebook=f"notebooks/{notebook}.ipynb",
            claims=CLAIMS,
            records=records(read_by(notebook)),
        output:
            html=report(
                f"results/{{run}}/notebooks/{notebook}.html",
                category="Notebooks",
                caption="../report/notebook.rst",
            ),
            figures=report(
                [f"results/{{run}}/figures/{name}.png" for name in figures(notebook)],
                category=title,
                caption="../report/figure.rst",
            ),
        log:
            notebook=f"results/{{run}}/notebooks/{notebook}.ipynb",
            text=f"results/{{run}}/logs/notebook-{notebook}.log",
        priority: len(figures(notebook)) / 100  # below every point's; the longest first, else it is waited for alone
        localrule: READ_HERE
        conda:
            "../../environment.yml"
        resources:
            **submission(),
        params:
            records=record_folder,
            name=notebook,
            reader=PLAN["reader"],
            beside=beside,
        shell:
            "repro notebook {params.name:q} --out results/{wildcards.run:q}/notebooks"
            " -p records={params.records:q} -p output=results/{wildcards.run:q}/figures > {log.text:q} 2>&1"

    rule:
        name:
            notebook
        input:
            f"results/{RUN}/notebooks/{notebook}.html",
            expand("results/{run}/figures/{name}.png", run=RUN, name=figures(notebook)),
        localrule: True


rule verdicts:
    input:
        claims=CLAIMS,
        records=records(PLAN["experiments"]),
    output:
        "results/{run}/claims.json",
    log:
        "results/{run}/logs/claims.log",
    localrule: READ_HERE
    conda:
        "../../environment.yml"
    resources:
        **submission(),
    params:
        records=record_folder,
        reader=PLAN["reader"],
    shell:
        # 3: judged, though some files were no records; the report names them.
        "repro claims --results {params.records:q} --out {output:q} > {log:q} 2>&1 || [ $? = 3 ]"


rule html_report:
    input:
        expand("results/{{run}}/notebooks/{notebook}.html", notebook=PLAN["notebooks"]),
        expand("results/{{run}}/figures/{name}.png", name=PLAN["figures"]),
        claims=rules.verdicts.output,
    output:
        "results/{run}/report.html",
    log:
        "results/{run}/logs/report.log",
    localrule: READ_HERE
    conda:
        "../../environment.yml"
    resources:
        **submission(),
    params:
        records=record_folder,
        reader=PLAN["reader"],
        beside=beside,
    shell:
        "repro report --results {params.records:q} --figures results/{wildcards.run:q}/figures"
        " --out {output:q} > {log:q} 2>&1"


rule replot:
    input:
        "results/replot/report.html",
    localrule: True


for figure in PLAN["figures"]:

    rule:
        name:
            figure
        input:
            f"{PLAN['results']}/figures/{figure}.png",
        localrule: True
