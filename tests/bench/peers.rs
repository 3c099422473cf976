//! The peers that judge TLS by its server name, set up as their manuals advise for speed: one thread,
//! no log, splice where they can, the far side by address. Each listens on every gateway of the yard.

use std::net::SocketAddr;
use std::time::Duration;

use policy::Slot;
use world::poll::eventually;

use crate::load;
use crate::machine::Machine;
use crate::stage::{NAME, Peer, SITE, Stage};

/// One way to the far side: through a peer, through us, or through nothing.
#[derive(Debug)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    /// Whose processor time counts; none: there is nobody in between.
    pub(crate) pid: Option<u32>,
    /// Port on the guest's gateway; none: the guest speaks to the site itself.
    port: Option<u16>,
    pub(crate) ours: bool,
    _peer: Option<Peer>,
}

impl Way {
    /// Where the guest in this slot of the yard, or of the daemon, connects to.
    pub(crate) fn target(&self, slot: Slot) -> SocketAddr {
        self.port.map_or((SITE, 443).into(), |port| Machine::gateway(slot, port))
    }
}

/// Ours, the peers and none, all running.
pub(crate) fn all(stage: &Stage, probe: &Machine, slot: Slot, hello: &[u8]) -> Vec<Way> {
    let way = |name, pid, port, ours, peer| Way { name, pid, port, ours, _peer: peer };
    let mut ways = vec![way("ours", Some(stage.pid()), None, true, None)];
    for (name, port, start) in [
        ("haproxy", 10_443, haproxy as fn(&Stage, u16) -> Peer),
        ("nginx", 11_443, nginx),
        ("sniproxy", 12_443, sniproxy),
    ] {
        let peer = start(stage, port);
        ways.push(way(name, Some(peer.pid()), Some(port), false, Some(peer)));
    }
    ways.push(way("direct", None, None, false, None));
    for way in ways.iter().filter(|way| !way.ours) {
        eventually(&format!("{} lets through", way.name), Duration::from_secs(20), || {
            probe.netns.run(|| load::open(way.target(slot), hello).ok()).map(drop)
        });
    }
    ways
}

fn write(stage: &Stage, name: &str, text: &str) -> String {
    let path = stage.dir.join(name);
    std::fs::write(&path, text).expect("a peer's configuration");
    path.display().to_string()
}

fn haproxy(stage: &Stage, port: u16) -> Peer {
    let text = format!(
        "global\n  nbthread 1\n  maxconn 4000\n  tune.pipesize 1048576\n\
         defaults\n  mode tcp\n  timeout connect 10s\n  timeout client 1h\n  timeout server 1h\n\
         \x20 option splice-auto\n  option dontlognull\n\
         frontend guests\n  bind 0.0.0.0:{port}\n  tcp-request inspect-delay 10s\n\
         \x20 tcp-request content accept if {{ req.ssl_hello_type 1 }}\n\
         \x20 use_backend site if {{ req.ssl_sni -i {NAME} }}\n\
         backend site\n  server one {SITE}:443\n"
    );
    let path = write(stage, "haproxy.cfg", &text);
    stage.peer("haproxy", &["-db", "-f", &path])
}

fn nginx(stage: &Stage, port: u16) -> Peer {
    let dir = stage.dir.display();
    let text = format!(
        "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\n\
         worker_processes 1;\npid {dir}/nginx.pid;\nerror_log {dir}/nginx-error.log;\n\
         events {{ worker_connections 4000; multi_accept on; }}\n\
         stream {{\n  map $ssl_preread_server_name $far {{ {NAME} {SITE}:443; default \"\"; }}\n\
         \x20 server {{ listen {port} backlog=4096; ssl_preread on; proxy_pass $far;\n\
         \x20   proxy_buffer_size 64k; proxy_timeout 1h; tcp_nodelay on; access_log off; }}\n}}\n"
    );
    let path = write(stage, "nginx.conf", &text);
    stage.peer("nginx", &["-c", &path, "-g", "daemon off;"])
}

fn sniproxy(stage: &Stage, port: u16) -> Peer {
    let dir = stage.dir.display();
    let text = format!(
        "user root\npidfile {dir}/sniproxy.pid\n\
         listener 0.0.0.0:{port} {{\n  protocol tls\n  table guests\n}}\n\
         table guests {{\n  {} {SITE}:443\n}}\n",
        NAME.replace('.', "\\\\.")
    );
    let path = write(stage, "sniproxy.conf", &text);
    stage.peer("sniproxy", &["-f", "-c", &path])
}
