//! From an `Exec` to a running child in a process group of its own. No shell, no inherited
//! environment.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use agent::Exec;

/// What a command finds when the host sends no environment.
const ENVIRONMENT: [(&str, &str); 3] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("LANG", "C.UTF-8"),
    ("TERM", "xterm-256color"),
];

struct User {
    name: String,
    uid: u32,
    gid: u32,
    home: String,
}

/// Starts the command with three pipes.
pub(crate) fn spawn(exec: &Exec) -> io::Result<Child> {
    let (program, arguments) =
        exec.argv.split_first().ok_or_else(|| io::Error::other("argv is empty"))?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(ENVIRONMENT);
    let home = match &exec.user {
        None => "/root".to_owned(),
        Some(name) => {
            let passwd = fs::read_to_string("/etc/passwd")?;
            let user = find(&passwd, name)
                .ok_or_else(|| io::Error::other(format!("no user {name} in /etc/passwd")))?;
            command.uid(user.uid).gid(user.gid).env("USER", &user.name);
            user.home
        }
    };
    command.env("HOME", &home).envs(&exec.env);
    command.current_dir(folder(exec.cwd.as_deref(), &home)?);
    command.process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn()
}

/// Where it starts: as asked, or at home, or where nobody's home is needed.
fn folder<'a>(asked: Option<&'a str>, home: &'a str) -> io::Result<&'a str> {
    match asked {
        Some(asked) if Path::new(asked).is_dir() => Ok(asked),
        Some(asked) => Err(io::Error::other(format!("no folder {asked}"))),
        None if Path::new(home).is_dir() => Ok(home),
        None => Ok("/"),
    }
}

/// The line of passwd(5) with this name.
fn find(passwd: &str, wanted: &str) -> Option<User> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| *name == wanted)?.to_owned();
        let (_password, uid, gid) = (fields.next()?, fields.next()?, fields.next()?);
        let (_comment, home) = (fields.next()?, fields.next()?);
        Some(User { name, uid: uid.parse().ok()?, gid: gid.parse().ok()?, home: home.to_owned() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_starts_where_it_is_told_or_in_a_folder_that_is_there() {
        assert_eq!(folder(None, "/").expect("there"), "/");
        assert_eq!(folder(None, "/nonexistent").expect("nobody"), "/");
        assert_eq!(folder(Some("/proc"), "/").expect("there"), "/proc");
        let missing = folder(Some("/no/such"), "/").expect_err("not there");
        assert!(missing.to_string().contains("/no/such"));
    }

    #[test]
    fn a_user_is_its_own_line_only() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1001::/home/agent:/bin/sh\n";
        let user = find(passwd, "agent").expect("there");
        assert_eq!((user.uid, user.gid, user.home.as_str()), (1000, 1001, "/home/agent"));
        assert!(find(passwd, "age").is_none());
        assert!(find("agent:x:not:1::/:", "agent").is_none());
    }
}
