"""Natural gradient against gradient descent on the Rosenbrock function: a table of steps, and a figure."""

from natgrad import plots

if __name__ == "__main__":
    print(f"{'steps to a cost below 1e-8':>58}")
    for name, steps in plots.rosenbrock_steps():
        print(f"{name:50}{steps:8,}")
    paths = plots.save_figures(["rosenbrock"], "out")
    print(f"\nThe figure is {paths[1]}, also in the dark and as SVG.")
