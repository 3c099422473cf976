//! The program's entry. Everything is in the library, where tests reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    postern::cli::main()
}
