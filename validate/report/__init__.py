"""Reports people look at: one self-contained HTML file made from run directories, sweeps and plans."""
