//! The register of connections by itself: its cap, its cuts, and when they are over.

use policy::{Layer, Policy, Revision};

use super::*;

#[test]
fn the_cap_holds_and_a_dropped_flow_makes_room() {
    let meter = Meter::new();
    let flows = Flows::new(2, meter.clone());
    let first = flows.register().expect("room");
    let second = flows.register().expect("room");
    assert!(flows.register().is_none());
    assert_ne!(first.id(), second.id());
    drop(first);
    assert_eq!(meter.open(), 1);
    assert!(flows.register().is_some());
}

#[tokio::test]
async fn shutting_cuts_what_is_open_and_takes_nothing_more() {
    let flows = Flows::new(8, Meter::new());
    let flow = flows.register().expect("room");
    assert_eq!(flows.shut(), 1);
    assert_eq!(flows.shut(), 0, "a second shut cuts nothing");
    assert!(matches!(flow.cut().await, Cut::Detached));
    assert!(flows.register().is_none());
    drop(flow);
    flows.empty().await;
}

fn judged(name: &str) -> Arc<Judged> {
    let sni = Host::parse(name).expect("a name");
    Arc::new(Judged {
        basis: Basis::Tls { sni: sni.clone(), ech: false },
        destination: SocketAddr::from(([203, 0, 113, 5], 443)),
        target: Target::Name(sni),
        candidates: Vec::new(),
        dialed: None,
    })
}

fn policy(rules: &str) -> Compiled {
    let policy = Policy::from_toml(rules).expect("a policy");
    Compiled::new(&[(Layer::Sandbox, &policy)], Revision(2))
}

fn rejudged(flows: &Flows, policy: &Compiled, ending: &Ending) -> Rejudged {
    let (mut again, mut done) = (flows.again(), Rejudged::default());
    while let Some((one, _)) = again.next(policy, &OwnAddresses::default(), ending) {
        done.add(one);
    }
    done
}

#[test]
fn only_connections_that_were_let_through_are_judged_again() {
    let flows = Flows::new(8, Meter::new());
    let sniffing = flows.register().expect("room");
    let open = flows.register().expect("room");
    open.note(&judged("api.example.com"));
    let ending = Ending::new();
    let done = rejudged(&flows, &Compiled::default(), &ending);
    assert_eq!((done.checked, done.cut), (1, 1));
    assert!(matches!(open.was_cut(), Some(Cut::Denied(_))));
    assert!(sniffing.was_cut().is_none());
}

#[test]
fn a_dial_is_cut_when_one_of_the_addresses_that_it_tries_is_denied() {
    let allow = "[[rule]]\nallow = [\"api.example.com\"]\n";
    let deny = format!("{allow}[[rule]]\ndeny = [\"93.184.216.9\"]\n");
    let flows = Flows::new(8, Meter::new());
    let flow = flows.register().expect("room");
    let mut dialling = Judged::clone(&judged("api.example.com"));
    dialling.candidates = [5, 9].map(|n| SocketAddr::from(([93, 184, 216, n], 443))).to_vec();
    flow.note(&Arc::new(dialling));
    for (rules, cut) in [(allow, 0), (&deny, 1)] {
        let done = rejudged(&flows, &policy(rules), &Ending::new());
        assert_eq!(done.cut, cut, "{rules}");
    }
}

#[test]
fn connections_come_and_go_while_others_are_judged_again() {
    let flows = Flows::new(8, Meter::new());
    let [first, second] = [(); 2].map(|()| {
        let flow = flows.register().expect("room");
        flow.note(&judged("api.example.com"));
        flow
    });
    let (mut again, own, ending) = (flows.again(), OwnAddresses::default(), Ending::new());
    let mut next = || again.next(&Compiled::default(), &own, &ending);
    assert_eq!(next().expect("one").0.cut, 1);
    let open =
        [first, second].into_iter().find(|flow| flow.was_cut().is_none()).expect("the other");
    drop(open);
    let later = flows.register().expect("room");
    later.note(&judged("api.example.com"));
    assert_eq!(next().expect("the other").0.checked, 0, "it has ended meanwhile");
    assert!(next().is_none(), "one that came later was judged by what is in force then");
    assert!(later.was_cut().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_cut_is_over_when_nobody_holds_the_connection() {
    let flows = Flows::new(8, Meter::new());
    let (flow, other) = (flows.register().expect("room"), flows.register().expect("room"));
    let last = judged("api.example.com");
    flow.note(&last);
    flow.rest(&last);
    let flow = Arc::new(flow);
    let held = Arc::clone(&flow);
    let write = |cut| {
        let ending = Ending::new();
        let done = rejudged(&flows, &Compiled::default(), &ending);
        assert_eq!((done.checked, done.cut), (cut, cut), "one that rests is judged, too");
        ending
    };
    let patience = Duration::from_secs(2);
    assert_eq!(write(1).over(patience).await, 1);
    held.cut().await;
    drop(flow);
    let mut second = std::pin::pin!(write(0).over(patience));
    assert!(futures_util::poll!(&mut second).is_pending(), "a task still has a socket");
    drop(held);
    assert_eq!(second.await, 0, "a later write waits for it, too");
    drop(other);
}
