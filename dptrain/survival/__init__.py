"""Jobs that outlive their ranks: `dptrain train --survive`."""
