"""What every room uses: heads of result files, names, processes, servers, a queue of commands."""
